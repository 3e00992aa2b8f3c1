"""From a Hugging Face-style batch to `Inputs`: labels shifted, positions, documents and validity settled, counts taken.

All of it happens here once, on the whole unsharded batch, because each piece is wrong when it is done on a slice:
labels shifted after sharding lose a target at every shard edge, positions restart on every rank, documents that
cross an edge are joined to their neighbours, and a per-rank count of targets makes a mean of means.

What the mask cannot say (a 4-D mask, an unknown key) is refused rather than replaced by plain causal attention.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fcp.masks import describe
from fcp.typing import IGNORED, Inputs

__all__ = ["prepare"]

_KNOWN = (
    "input_ids",
    "inputs_embeds",
    "labels",
    "attention_mask",
    "position_ids",
    "document_ids",
    "num_items_in_batch",
)


def prepare(batch: Inputs | Mapping[str, Any]) -> Inputs:
    """Turns a batch with Hugging Face's names into `Inputs`; `Inputs` come back as they are.

    Args:
        batch: with `input_ids` [batch, seq] int64 or `inputs_embeds` [batch, seq, hidden] (zeros are put in the place
            of those of padding), and optionally
            `labels` [batch, seq], unshifted, -100 for none;
            `attention_mask` [batch, seq], 1 for real tokens, 0 for padding on either side;
            `position_ids` [batch, seq] or [seq]: 0..seq-1 by default. Where they are given, a new document starts
            wherever a position is not the previous one plus one;
            `document_ids` [batch, seq]: documents said outright;
            `num_items_in_batch`: the number of targets to divide the loss by, where it counts more than this batch;
            an int or a tensor of one.
            Integers of any width; they come back as int64.

    Returns:
        Inputs whose targets are shifted inside documents: the last token of a document has none, and padding neither
        is a target nor predicts one.

    Raises:
        ValueError: an unknown key, both or neither of tokens and embeddings, shapes or dtypes that do not fit, a mask
            that is not [batch, seq] of zeros and ones, labels below 0 other than -100.
    """
    if isinstance(batch, Inputs):
        return batch
    unknown = sorted(set(batch) - set(_KNOWN))
    if unknown:
        raise ValueError(f"prepare: batch has {', '.join(map(repr, unknown))}; known are {', '.join(_KNOWN)}")
    given = {name: value for name, value in batch.items() if value is not None}
    if ("input_ids" in given) == ("inputs_embeds" in given):
        raise ValueError("prepare: give exactly one of input_ids [batch, seq] and inputs_embeds [batch, seq, hidden]")
    tokens, embeds = given.get("input_ids"), given.get("inputs_embeds")
    _check(given)
    lead: Tensor = given["inputs_embeds"] if tokens is None else tokens
    rows = lead.shape[:2]

    valid = given.get("attention_mask")
    valid = None if valid is None else valid != 0
    if embeds is not None and valid is not None:  # what lies there is nobody's: a NaN would reach others as 0 * NaN
        embeds = torch.where(valid[..., None], embeds, 0.0)
    arange = torch.arange(rows[1], device=lead.device).expand(rows)
    positions = given.get("position_ids")
    if positions is None:
        positions = arange
        # Windows do not see a constant shift, but chunks do: left padding must not move their edges.
        mask_positions = arange if valid is None else arange - _leading_padding(valid)[:, None]
    else:
        positions = mask_positions = positions.to(torch.int64).expand(rows)
    mask = describe(mask_positions, documents=given.get("document_ids"), valid=valid)

    labels = given.get("labels")
    targets = None if labels is None else _shift(labels.to(torch.int64), mask.documents, valid)
    num_targets = given.get("num_items_in_batch")
    if num_targets is None:
        num_targets = 0 if targets is None else (targets != IGNORED).sum()
    return Inputs(
        tokens=None if tokens is None else tokens.to(torch.int64),
        embeds=embeds,
        positions=positions,
        targets=targets,
        mask=mask,
        num_targets=torch.as_tensor(num_targets, dtype=torch.int64, device=lead.device).reshape(()),
        num_positions=positions.max() + 1,
        real=valid,
    )


def _shift(labels: Tensor, documents: Tensor | None, valid: Tensor | None) -> Tensor:
    """targets[i] = labels[i + 1] where both tokens are real and of one document."""
    targets = torch.full_like(labels, IGNORED)
    targets[:, :-1] = labels[:, 1:]
    if documents is not None:
        targets[:, :-1][documents[:, 1:] != documents[:, :-1]] = IGNORED
    if valid is not None:
        targets[:, :-1][~(valid[:, 1:] & valid[:, :-1])] = IGNORED
    return targets


def _leading_padding(valid: Tensor) -> Tensor:
    """[batch]: how many tokens of a row come before its first valid one."""
    return (valid.cumsum(-1) == 0).sum(-1)


def _check(given: Mapping[str, Any]) -> None:
    """Raises for every entry that does not fit, all at once."""
    count = given.get("num_items_in_batch", 0)
    tensors = {name: x for name, x in given.items() if name != "num_items_in_batch"}
    other = [f"{name} is a {type(x).__name__}" for name, x in tensors.items() if not isinstance(x, Tensor)]
    if other:
        raise ValueError(f"prepare: {'; '.join(other)}; give tensors")
    mask = tensors.get("attention_mask")
    if mask is not None and mask.dim() > 2:
        raise ValueError(
            f"prepare: attention_mask of shape {tuple(mask.shape)}: a dense mask is refused, because it cannot be "
            f"checked to be one that a split sequence keeps. Say it by position_ids or document_ids (packed "
            f"documents), a [batch, seq] attention_mask (padding), or the model's window or chunk."
        )
    name = "input_ids" if "input_ids" in tensors else "inputs_embeds"
    lead = tensors[name]
    if lead.dim() != (2 if name == "input_ids" else 3) or 0 in lead.shape[:2]:
        rule = "[batch, seq]" if name == "input_ids" else "[batch, seq, hidden]"
        raise ValueError(f"prepare: {name} of shape {tuple(lead.shape)} must be {rule}, of at least one row and token")
    rows = tuple(lead.shape[:2])
    wrong = []
    for name, x in tensors.items():
        fits = [rows, (1, rows[1]), (rows[1],)] if name == "position_ids" else [rows]
        if (tuple(x.shape) if x is not lead else rows) not in fits:
            wrong.append(f"{name} of shape {tuple(x.shape)}")
        elif name == "attention_mask":
            if bool(((x != 0) & (x != 1)).any()):
                wrong.append(
                    "attention_mask with values other than 0 and 1 (1 is a real token, 0 padding; document_ids say "
                    "packed documents)"
                )
        elif x.is_floating_point() != (name == "inputs_embeds") or x.dtype == torch.bool:
            wrong.append(f"{name} of dtype {x.dtype}")
        elif name == "labels" and bool(((x < 0) & (x != IGNORED)).any()):
            wrong.append(f"labels below 0 other than {IGNORED}")
    integer = type(count) is int or (isinstance(count, Tensor) and not count.is_floating_point() and count.numel() == 1)
    if not integer or count < 0:
        wrong.append(f"num_items_in_batch {count!r}, which is no count")
    if wrong:
        raise ValueError(
            f"prepare: {'; '.join(wrong)}. Ids, labels and masks must be integers of shape {rows} (position_ids may "
            f"be one row for all), embeddings floating, num_items_in_batch one integer."
        )
