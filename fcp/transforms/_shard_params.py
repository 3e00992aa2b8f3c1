"""shard_params: each rank holds a part of every parameter, by rules (tensor parallelism) or by gather (FSDP).

**By rules** (Shoeybi et al. 2019, section 3). The model's rules say which dim of which leaf is cut; the rank computes
with its slice. `enter` marks where split work begins (`pvary`: its gradient is summed), `leave` adds up what the ranks
found (`psum`). The vocabulary is split too: a token's row lives on one rank, and the loss reduces three numbers a
token. A vocabulary that the ranks do not divide is padded; padded columns are cut off before anything reads them. A
leaf that split work reads whole (`Shared`) is marked varying, so that its gradient is the sum of the ranks'.

**By gather** (ZeRO stage 3: Rajbhandari et al. 2020, section 5). Every leaf is stored in equal pieces of dim 0. A
layer's pieces are gathered where the layer begins and freed where it ends; its backward gathers them again, because
the layer is rematerialised, and leaves each rank the sum of its piece (`psum_scatter`). Storage over (fsdp, cp) needs
no other sum over these axes. Over an axis that splits no work (storage alone), every rank's gradient is the same one,
and there the gather is an `unshard`, whose adjoint sums nothing.

Both may be applied, in either order: the slice is cut first, then stored.
"""

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch
import torch._C._functorch as _functorch
from torch import Tensor

from fcp import pytree
from fcp._linear import linear
from fcp._regather import Window, by_kind, is_piece
from fcp._tiled_loss import in_tiles, tiled_losses
from fcp.axes import Axes, axis_index, axis_size, lookup, names_of
from fcp.collectives import all_gather, all_gather_each, pmax, psum, pvary, shard, unshard
from fcp.loss import cap, token_losses
from fcp.ops import Ops
from fcp.remat import rematerialize
from fcp.sharded import Piece, Placement, Shapes, Sharded, base_model
from fcp.trace import event_of, recording, tap
from fcp.typing import Inputs, ModelFn, Output, Params, Rule, Rules, Shared, Split

__all__ = ["check_rules", "indivisible", "shard_params", "tensor_parallel", "vocabulary"]


def shard_params(model_fn: ModelFn, *, axis: Axes = "tp", how: Literal["rules", "gather"] | None = None) -> Sharded:
    """Splits the parameters over `axis`, by rules or by gather.

    By rules, a matrix [out, in] becomes [out_local, in] or [out, in_local], and a table [vocab, hidden] becomes
    [vocab_local, hidden] (Shoeybi et al. 2019, section 3). By gather, a leaf [n, ...] is stored as [n / ranks, ...] and
    whole only while its layer runs (Rajbhandari et al. 2020, section 5).

    Args:
        model_fn: by rules, a model with `rules`; by gather, any model function that calls its layers through
            `ops.layer`.
        axis: by rules one name; by gather one name or several (the product, as ("fsdp", "cp")).
        how: "rules" or "gather"; by default "gather" where "fsdp" is among the names, else "rules".

    Raises:
        ValueError: by rules: the model has none, several axes are named, or, when called, a leaf matches no rule or
            several, a rule matches no leaf, or the axis does not divide what a rule splits. By gather, when called: the
            model never calls `ops.layer`.
    """
    names = names_of(axis)
    how = how or ("gather" if "fsdp" in names else "rules")
    if how == "gather":
        return _by_gather(model_fn, names)
    if how != "rules":
        raise ValueError(f"shard_params: how={how!r}; it is 'rules' or 'gather'")
    if len(names) != 1:
        raise ValueError(
            f"shard_params: rules split over one axis, not {names}; for storage over several, how='gather'"
        )
    rules = getattr(base_model(model_fn), "rules", None)
    if rules is None:
        raise ValueError(
            f"shard_params: {base_model(model_fn)!r} has no rules, so nothing says how its parameters split over "
            f"{names[0]!r}. Wrap it as fcp.Model(config, apply, init, rules), or store them with how='gather'."
        )
    return _by_rules(model_fn, names[0], dict(rules))


# --- by rules ---------------------------------------------------------------------------------------------------------


def check_rules(rules: Rules, shapes: Shapes) -> dict[str, Rule]:
    """The one rule of each leaf, by path.

    Raises:
        ValueError: a leaf that no rule or several match, a rule that matches no leaf, a dim that a leaf does not have,
            pieces that do not add up, a vocabulary of another size; all of them at once.
    """
    wrong: list[str] = []
    found: dict[str, Rule] = {}
    unused = set(rules)
    for path, shape in shapes.items():
        matching = [pattern for pattern in rules if fnmatchcase(path, pattern)]
        unused -= set(matching)
        if len(matching) != 1:
            wrong.append(f"{path} matches {'no rule' if not matching else ' and '.join(matching)}")
            continue
        rule = found[path] = rules[matching[0]]
        if isinstance(rule, Split):
            if not -len(shape) <= rule.dim < len(shape):
                wrong.append(f"{path} of shape {shape} has no dim {rule.dim}")
            elif rule.pieces is not None and sum(rule.pieces) != shape[rule.dim]:
                wrong.append(f"{path}: pieces {rule.pieces} do not add up to {shape[rule.dim]}")
            elif rule.vocab is not None and rule.vocab != shape[rule.dim]:
                wrong.append(f"{path} of shape {shape} holds no vocabulary of {rule.vocab} tokens along dim {rule.dim}")
    wrong += [f"rule {pattern} matches no parameter" for pattern in unused]
    if wrong:
        raise ValueError(
            f"shard_params: {'; '.join(sorted(wrong))}. Every leaf needs exactly one rule, every rule a leaf."
        )
    return found


def indivisible(rules: Rules, axis: str, size: int, shapes: Shapes | None = None) -> list[str]:
    """What `size` ranks of `axis` cannot split evenly, in words; without `shapes`, what the rules alone can tell."""
    wrong = []
    by_path = rules.items() if shapes is None else check_rules(rules, shapes).items()
    for path, rule in by_path:
        if not isinstance(rule, Split) or rule.vocab:
            continue
        counts = [] if rule.blocks is None else [("blocks", rule.blocks)]
        counts += [("entries in a piece", piece) for piece in rule.pieces or ()]
        if shapes is not None and not rule.pieces:
            counts.append(("entries", shapes[path][rule.dim]))
        wrong += [
            f"{path}: {axis}={size} does not divide {n} {what} of dim {rule.dim}" for what, n in counts if n % size
        ]
    return wrong


def _by_rules(model_fn: ModelFn, axis: str, rules: Rules) -> Sharded:
    def place(placements: dict[str, Placement], shapes: Shapes) -> dict[str, Placement]:
        by_path = check_rules(rules, shapes)
        wrong = indivisible(rules, axis, axis_size(axis), shapes)
        if wrong:
            raise ValueError(f"shard_params: {'; '.join(wrong)}. Choose a size that divides them.")

        def add(p: Placement, rule: Rule) -> Placement:
            if isinstance(rule, Split):
                return replace(p, slices=(*p.slices, (axis, rule)))
            return replace(p, varies=p.varies | {axis}) if isinstance(rule, Shared) else p

        return {path: add(p, by_path[path]) for path, p in placements.items()}

    def run(inner: ModelFn, params: Params, inputs: Inputs, ops: Ops) -> Output:
        return inner(params, inputs, tensor_parallel(ops, axis, vocabulary(rules)))

    return Sharded(model_fn, f"shard_params({axis})", run, place)


def vocabulary(rules: Rules) -> int | None:
    """The tokens of the vocabulary that the rules split; None where they split none."""
    sizes = {rule.vocab for rule in rules.values() if isinstance(rule, Split)} - {None}
    if len(sizes) > 1:
        raise ValueError(f"shard_params: the rules name vocabularies of {sorted(map(str, sizes))} tokens; there is one")
    return next(iter(sizes), None)


def tensor_parallel(ops: Ops, axis: str, vocab: int | None) -> Ops:
    """The operations of a rank of `axis`; a vocabulary of `vocab` tokens is split (None: no rule names one)."""

    def enter(x: Tensor) -> Tensor:
        return pvary(ops.enter(x), axis)

    def leave(x: Tensor) -> Tensor:
        return ops.leave(psum(x, axis))

    def split(x: Tensor) -> Tensor:
        return shard(ops.split(x), axis, dim=-1)

    def join(x: Tensor) -> Tensor:
        return ops.join(unshard(x, axis, dim=-1))

    def whole(table: Tensor) -> bool:
        """Whether every rank holds all rows (the rule of the table is Replicated)."""
        if vocab is None:
            raise ValueError(
                f"shard_params: the model reads a table through ops.embed or ops.loss, and no rule names the "
                f"vocabulary, so nothing says which tokens a rank of {axis!r} holds. Write fcp.Split(0, vocab=...) as "
                f"the rule of the table; any number of tokens can be split."
            )
        return table.shape[-2] == vocab > -(-vocab // axis_size(axis))

    def embed(ids: Tensor, table: Tensor) -> Tensor:
        if whole(table):
            return ops.embed(ids, table)
        local = ids - _first(table)
        mine = (local >= 0) & (local < table.shape[0])
        rows = ops.embed(torch.where(mine, local, 0), table)
        return psum(torch.where(mine.unsqueeze(-1), rows, 0.0), axis)

    def loss(
        hidden: Tensor,
        table: Tensor | None,
        targets: Tensor | None,
        *,
        logits: bool = True,
        softcap: float | None = None,
        tile: int | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        if table is None or whole(table):
            return ops.loss(hidden, table, targets, logits=logits, softcap=softcap, tile=tile)
        hidden = pvary(hidden, axis)
        first, most, total_of = _first(table), partial(pmax, axis=axis), partial(psum, axis=axis)
        if in_tiles(hidden, table, logits, tile) and targets is not None:
            losses = tiled_losses(
                *(hidden, table, targets),
                tile=tile,
                softcap=softcap,
                first=first,
                vocab=limit(table.shape[-2]),
                reduce_max=most,
                reduce_sum=total_of,
            )
            return losses.sum(), None
        scores = cap(linear(hidden, table), softcap)
        total = None
        if targets is not None:
            real = hide_padding(scores)
            total = token_losses(real, targets, first=first, reduce_max=most, reduce_sum=total_of).sum()
        return total, (unshard(scores, axis, dim=-1)[..., :vocab] if logits else None)

    def limit(rows: int) -> int | None:
        """`vocab`, where the ranks' `rows` are more than that together: the last ones are padding."""
        return None if vocab is None or rows * axis_size(axis) == vocab else vocab

    def hide_padding(scores: Tensor) -> Tensor:
        words = limit(scores.shape[-1])
        if words is None:
            return scores
        column = torch.arange(scores.shape[-1], device=scores.device) + _first(scores.mT)
        return scores.masked_fill(column >= words, -torch.inf)

    def _first(table: Tensor) -> Tensor:
        """The token id of the first row of `table` [vocab_local, hidden] on this rank."""
        return axis_index(axis).to(table.device) * table.shape[-2]

    return replace(ops, enter=enter, leave=leave, split=split, join=join, embed=embed, loss=loss)


# --- by gather --------------------------------------------------------------------------------------------------------


def _by_gather(model_fn: ModelFn, names: tuple[str, ...]) -> Sharded:
    def place(placements: dict[str, Placement], shapes: Shapes) -> dict[str, Placement]:
        stored = {path for path, p in placements.items() if p.stored}
        if stored:
            raise ValueError(f"shard_params: the parameters are stored over {placements[stored.pop()].stored} already")
        # A scalar has no dim to store in pieces: it stays whole on every rank.
        return {path: replace(p, stored=names) if shapes[path] else p for path, p in placements.items()}

    def run(inner: ModelFn, params: Params, inputs: Inputs, ops: Ops) -> Output:
        called: list[bool] = []
        pieces = [x for x in pytree.flatten(params, is_piece)[0] if isinstance(x, Piece)]
        alike = any(piece.alike for piece in pieces)
        on_processes = any(axis.mesh is not None for axis in lookup(names, "shard_params", consumes=False))
        window = Window(pieces)
        del pieces  # `layer` is part of what layers close over, and must hold no tensor

        def layer(fn: Callable[..., Any], layer_params: Params, *args: Any) -> Any:
            called.append(True)
            whole = partial(ops.layer, fn)
            if alike:
                return rematerialize(partial(_on_gathered, whole))(layer_params, *args)
            if not on_processes:
                return _on_gathered(whole, layer_params, *args)
            if _functorch.get_interpreter_stack():  # its graph of the gradient would read what is freed
                return rematerialize(partial(_on_gathered, whole))(layer_params, *args)
            return window.run(whole, layer_params, *args)

        out = inner(params, inputs, replace(ops, layer=layer))
        window.settle()
        if not called:
            raise ValueError(
                f"shard_params: the model never called ops.layer, so nothing gathered the parameters stored over "
                f"{names}. Call every layer through ops.layer(fn, layer_params, ...)."
            )
        return out

    return Sharded(model_fn, f"shard_params({' x '.join(names)})", run, place)


def _on_gathered(fn: Callable[..., Any], layer_params: Params, *args: Any) -> Any:
    """fn(the gathered parameters, *args). Where it is differentiated, the trace has the gathers of the backward too."""
    found, spec = pytree.flatten(layer_params, is_piece)
    at = [index for index, x in enumerate(found) if isinstance(x, Piece) and not x.alike]
    pieces = [found[index] for index in at]
    events = []
    for kind in by_kind(pieces):
        values = [pieces[i].value for i in kind]
        axes, sum_dtype = pieces[kind[0]].axes, pieces[kind[0]].sum_dtype
        for i, whole in zip(kind, all_gather_each(values, axes, sum_dtype=sum_dtype), strict=True):
            found[at[i]] = whole[: pieces[i].size]
        events.append(event_of("all_gather", axes, [tuple(x.shape) for x in values], values[0].dtype, backward=True))
    out = fn(pytree.unflatten(spec, [_gather(x) if isinstance(x, Piece) else x for x in found]), *args)
    if not recording():
        return out
    leaves, out_spec = pytree.flatten(out)
    moving = [index for index, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]
    for event in reversed(events):
        for index, x in zip(moving, tap([leaves[i] for i in moving], event), strict=True):
            leaves[index] = x
    return pytree.unflatten(out_spec, leaves)


def _gather(x: Piece) -> Tensor:
    whole = x.value
    for axes in (x.axes,) if not x.alike else reversed(x.axes):  # the last name is the fastest: join it first
        whole = (unshard if axes in x.alike else all_gather)(whole, axes, dim=0)
    return whole if whole.shape[0] == x.size else whole[: x.size]
