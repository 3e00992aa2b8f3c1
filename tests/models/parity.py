"""A family's model against transformers' module of the same config: what the families' tests share."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fcp
from fcp import pytree
from tests.tolerances import PARITY_GRADIENTS, PARITY_LOGITS
from tests.toys import PACK8, randomized, tokens, worst_error

BATCHES = ("plain", "packed", "left-padded", "right-padded")


def batch_of_kind(kind: str) -> dict[str, Tensor]:
    """Two rows of 8. transformers shifts labels over document starts and padding: the first label of each is -100."""
    ids = tokens(2, 8)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "packed":
        batch["position_ids"] = torch.tensor([PACK8, [0, 1, 2, 3, 4, 5, 6, 0]])
        batch["labels"] = ids.masked_fill(batch["position_ids"] == 0, -100)
    elif kind != "plain":
        row = [0, 0, 0, 1, 1, 1, 1, 1]
        batch["attention_mask"] = torch.tensor([row if kind == "left-padded" else row[::-1], [1] * 8])
        batch["labels"] = torch.where(batch["attention_mask"].cumsum(-1) * batch["attention_mask"] > 1, ids, -100)
    return batch


def in_module(path: str) -> str:
    """A leaf's name in transformers' module, which is its name in a checkpoint but for GPT-NeoX's head."""
    return path.replace("embed_out.", "lm_head.")


def module_of(family: Any, config: Any, params: Any) -> Any:
    """transformers' module of a config, with these parameters; a tied head is all that may be missing."""
    transformers = pytest.importorskip("transformers")
    made = transformers.AutoConfig.for_model(**family.config_to_json(config))
    module = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager")
    named = dict(zip(map(in_module, pytree.paths(params)), pytree.leaves(params), strict=True))
    found = module.load_state_dict(named, strict=False)
    assert (
        not found.unexpected_keys and set(found.missing_keys) <= {"lm_head.weight", "embed_out.weight"} - named.keys()
    )
    return module.train(False)


def errors(
    family: Any, made: fcp.Model, kind: str, ours: fcp.Model | None = None, dense: dict[str, Any] | None = None
) -> tuple[float, float, float]:
    """Errors of loss, logits and gradients in float32; `ours`, a mutant, computes in the place of `made`.

    A module that does not read documents off position ids is told by masks: `dense` says window and chunk of each kind
    of layer.
    """
    params, batch = randomized(made, dtype=torch.float32), batch_of_kind(kind)
    module = module_of(family, made.config, params)
    masks: dict[str, Any] = {}
    if dense is not None:
        description = fcp.prepare(batch).mask
        for layers, limits in dense.items():
            allowed = fcp.masks.materialize(description, **limits)
            assert allowed is not None
            masks[layers] = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    expected = module(**batch, **({"attention_mask": masks} if masks else {}), use_cache=False)
    expected.loss.backward()
    wanted = {name: x.grad for name, x in module.named_parameters() if x.grad is not None}
    out, found = fcp.value_and_grad(ours or made)(params, batch)
    named = zip(map(in_module, pytree.paths(found)), pytree.leaves(found), strict=True)
    grads = {name: x for name, x in named if name in wanted or x.any()}
    real = batch.get("attention_mask", torch.ones(2, 8)) == 1
    if out.statistics is not None and getattr(expected, "aux_loss", None) is not None:
        assert fcp.relative_error(expected.aux_loss.detach(), out.statistics["auxiliary_loss"]) <= PARITY_LOGITS
    return (
        fcp.relative_error(expected.loss.detach(), out.loss),
        fcp.relative_error(expected.logits.detach()[real], out.logits[real]),
        worst_error(wanted, grads),
    )


def assert_equal(family: Any, made: fcp.Model, kind: str, dense: dict[str, Any] | None = None) -> None:
    loss, logits, grads = errors(family, made, kind, dense=dense)
    assert loss <= PARITY_LOGITS and logits <= PARITY_LOGITS and grads <= PARITY_GRADIENTS


def assert_noticed(family: Any, made: fcp.Model, mutant: fcp.Model, kind: str = "plain") -> None:
    """The comparison tells `mutant` from transformers' module of `made`."""
    _, logits, grads = errors(family, made, kind, mutant)
    assert logits > 10 * PARITY_LOGITS and grads > 10 * PARITY_GRADIENTS


def assert_checkpoints(family: Any, made: fcp.Model, folder: Path) -> None:
    """Bit for bit through our files and transformers', which computes the same from ours; and read lazily."""
    transformers = pytest.importorskip("transformers")
    params = randomized(made, dtype=torch.float32)
    family.save(folder / "ours", made.config, params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "ours", dtype=torch.float32)
    with torch.no_grad():
        logits = theirs(tokens(2, 8), use_cache=False).logits
    assert fcp.relative_error(logits, made(params, {"input_ids": tokens(2, 8)}).logits) <= PARITY_LOGITS
    theirs.save_pretrained(folder / "theirs")
    for name in ("ours", "theirs"):
        again, read = family.load(folder / name)
        assert again.config == made.config and worst_error(params, read) == 0
        again, stored = family.load(folder / name, lazy=True)
        assert pytree.paths(stored) == pytree.paths(params)
        for x, kept in zip(pytree.leaves(params), pytree.leaves(stored), strict=True):
            assert not isinstance(kept, Tensor) and torch.equal(kept[:], x)
            assert x.dim() < 2 or torch.equal(kept[1:3, 1:-1], x[1:3, 1:-1])
