"""The pointwise proof: outside attention, does each position stand for itself?

Context parallelism is sound for a module when, but for `Ops.attention`, what it computes at a position depends on that
position's token and position id alone. Most do. State-space scans, causal convolutions, positions counted from the
start of the slice, attention of their own do not; under cp every rank would compute something plausible from its
slice alone. No list of good models is kept: the module itself is asked.

On a probe of a few tokens, with attention's output set to zero, the module runs on the whole row and on each half, with
the halves' own position ids. The logits of a half must be the half of the logits, and so must the queries, keys and
values that arrive at every attention call. Every parameter is drawn at random, since a convolution that starts as zeros
mixes nothing and hides. Where something differs, hooks find the first module whose output does.

The parameters are made a unit at a time inside `Ops.layer`, so a proof needs the memory of one layer; layers of the
same shapes have the same ones, which repeat one block of random numbers: to draw them all would cost more than to run.

Left out: what happens only on long rows (the kinds of rope scaling that do are refused by `functional`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from fcp import pytree
from fcp.huggingface._interfaces import Call
from fcp.huggingface._skeleton import Skeleton
from fcp.masks import describe
from fcp.ops import LOCAL
from fcp.typing import Inputs

__all__ = ["Proof", "close", "drawn", "words"]

TOKENS = 8
"""Of the probe."""

HALVES = (slice(TOKENS // 2, TOKENS), slice(0, TOKENS // 2))
"""The second first: most of what is wrong is wrong there."""

TOLERANCE = 2e-3
"""Relative to the largest entry: above what float32 rounding grows to over a deep stack of random layers, and far below
what a neighbour's influence amounts to."""

BLOCK = 262_147
"""Random numbers that the parameters repeat; a prime, so that no two rows of a matrix are the same."""

KINDS = (
    (("conv",), "a convolution along the sequence"),
    (("rotary", "position", "alibi", "rope"), "positions that are counted in the slice, not read from position_ids"),
    (
        ("mamba", "ssm", "delta", "recurrent", "rwkv", "lru", "retention", "lightning", "lstm", "kda", "scan"),
        "a state that is carried along the sequence",
    ),
    (("cross",), "attention to another sequence"),
    (("attention", "attn"), "attention of its own, which does not go through transformers' attention interface"),
)
"""What a module does, by words in the names of its class and path."""


@dataclass(frozen=True)
class _Run:
    """What one run gave: logits, and each attention call's (class, q, k, v)."""

    logits: Tensor
    calls: list[tuple[str, Tensor, Tensor, Tensor]]


class Proof:
    """Of one model; made once, and asked for by each transform that splits the sequence."""

    def __init__(self, skeleton: Skeleton, logits: Callable[..., Tensor], config: Any) -> None:
        self._skeleton, self._logits, self._config = skeleton, logits, config
        self._offset = 0

    def run_whole(self, firsts: list[int]) -> int:
        """The run on the whole row; gives which of `firsts` the module's own count of positions begins with.

        Raises whatever the module raises, where it cannot run as a function at all.
        """
        rows = slice(0, TOKENS)
        counted = self._run(rows, count=True)
        for self._offset in firsts:
            self._whole = self._run(rows)
            if _differs(counted, self._whole, rows) is None:
                return self._offset
        raise ValueError("huggingface: position ids 0, 1, 2, ... change what the module computes without any")

    def demand(self) -> None:
        """Raises ValueError with the reason unless the sequence may be split."""
        if self.mixes:
            raise ValueError(
                f"shard_seq: the sequence of this transformers module cannot be split: {self.mixes}. Each position "
                f"outside attention must stand for itself, or a rank would compute from its slice alone. Split the "
                f"batch or the parameters instead (dp, fsdp)."
            )

    @cached_property
    def mixes(self) -> str | None:
        """How positions reach each other outside of attention; None where each stands for itself."""
        for rows in HALVES:
            try:
                part = self._run(rows)
            except Exception as error:  # of every kind: this is somebody's module
                return f"it does not run on a slice of the sequence ({words(error)})"
            wrong = _differs(self._whole, part, rows)
            if wrong is not None:
                return self._culprit(rows) or wrong
        return None if self._whole.calls else "nothing in it attends through transformers' attention interface"

    @cached_property
    def branches(self) -> str | None:
        """Why simulated ranks cannot run it together; None where they can."""
        first, second = (self._inputs(rows) for rows in HALVES)
        tokens = torch.stack([first.tokens, second.tokens])  # type: ignore[list-item]

        def run(tokens: Tensor, positions: Tensor) -> Tensor:
            return self._run_on(replace(first, tokens=tokens), positions + self._offset, None)

        try:
            torch.func.vmap(run)(tokens, torch.stack([first.positions, second.positions]))
        except Exception as error:  # of every kind: this is somebody's module
            return f"its control flow depends on values, which differ between ranks ({words(error)})"
        return None

    @cached_property
    def refuses_embeds(self) -> str | None:
        """Why it takes no embeddings in the place of tokens; None where it does."""
        try:
            whole, part = (self._run(rows, embeds=True) for rows in (slice(0, TOKENS), HALVES[0]))
        except Exception as error:  # of every kind: this is somebody's module
            return words(error)
        return _differs(whole, part, HALVES[0])

    def _inputs(self, rows: slice) -> Inputs:
        vocab = getattr(self._config.get_text_config(decoder=True), "vocab_size", None) or 64
        tokens = (torch.arange(TOKENS) * 7 + 3)[None] % min(vocab, 1 << 15)
        positions = torch.arange(TOKENS)[None]
        return Inputs(
            tokens=tokens[:, rows],
            embeds=None,
            positions=positions[:, rows],
            targets=None,
            mask=describe(positions),
            num_targets=torch.tensor(0),
            num_positions=torch.tensor(TOKENS),
        )

    def _run(self, rows: slice, *, count: bool = False, embeds: bool = False) -> _Run:
        """One run on some tokens; `count` lets the module count positions itself."""
        calls: list[tuple[str, Tensor, Tensor, Tensor]] = []

        def seen(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> None:
            calls.append((type(module).__name__, q, k, v))

        inputs = self._inputs(rows)
        if embeds:
            width = self._skeleton.embedding_width()
            row = torch.randn(1, TOKENS, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            inputs = replace(inputs, tokens=None, embeds=row[:, rows].to(self._skeleton.dtype()))
        return _Run(self._run_on(inputs, None if count else inputs.positions + self._offset, seen), calls)

    def run_layers(self, layer: Callable[..., Any]) -> None:
        """The whole row once more, `layer` in the place of `Ops.layer`, with attention as it is."""
        inputs = self._inputs(slice(0, TOKENS))
        call = Call(replace(LOCAL, layer=layer), inputs.mask, inputs.positions + self._offset)
        with torch.enable_grad():
            self._logits(self._skeleton.parameters(), inputs, call)

    def _run_on(self, inputs: Inputs, positions: Tensor | None, seen: Any) -> Tensor:
        call = Call(replace(LOCAL, attention=_nothing, layer=_OnRandom()), inputs.mask, positions, seen=seen)
        with torch.no_grad():
            logits = self._logits(self._skeleton.parameters(), inputs, call)
        if logits.device.type == "meta":
            raise RuntimeError("a parameter is read outside of the unit that it belongs to")
        return logits

    # --- the first module that differs ------------------------------------------------------------------------------

    def _culprit(self, rows: slice) -> str | None:
        whole, part = self._traced(slice(0, TOKENS)), self._traced(rows)
        for name, (kind, given, out) in whole.items():
            if name in part and _same(given, part[name][1], rows) and not _same(out, part[name][2], rows):
                return f"{name} ({kind}) computes {what_it_does(name, kind)}"
        return None

    def _traced(self, rows: slice) -> dict[str, tuple[str, list[Tensor], list[Tensor]]]:
        """Each module's class, arguments and output, in the order in which they finish: the innermost first."""
        found: dict[str, tuple[str, list[Tensor], list[Tensor]]] = {}

        def hook(name: str, each: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            given, gave = ([x for x in pytree.leaves(tree) if isinstance(x, Tensor)] for tree in ((args, kwargs), out))
            found.setdefault(name, (type(each).__name__, given, gave))

        named = [(name, each) for name, each in self._skeleton.module().named_modules() if name]
        handles = [each.register_forward_hook(partial(hook, name), with_kwargs=True) for name, each in named]
        try:
            self._run(rows)
        finally:
            for handle in handles:
                handle.remove()
        return found


def what_it_does(name: str, kind: str) -> str:
    for text in (kind.replace("Conv1D", "Linear"), name.rpartition(".")[2]):  # transformers' Conv1D is a linear map
        for words, what in KINDS:
            if any(word in text.lower() for word in words):
                return what
    return "something from other positions"


def words(error: Exception) -> str:
    """What an error of somebody's module says, in a line."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".removeprefix(
        "ValueError: huggingface: "
    )


def _nothing(q: Tensor, k: Tensor, v: Tensor, mask: Any, **settings: Any) -> Tensor:
    return q.new_zeros((*q.shape[:3], v.shape[-1]))


class _OnRandom:
    """An `Ops.layer` for parameters without storage: drawn here, and kept while the next layer has the same ones."""

    def __init__(self) -> None:
        self._held: dict[Any, Tensor] = {}

    def __call__(self, fn: Callable[..., Any], layer_params: Any, *args: Any) -> Any:
        held: dict[Any, Tensor] = {}

        def get(path: str, x: Tensor) -> Tensor:
            key = (path, tuple(x.shape), x.dtype)
            held[key] = self._held[key] if key in self._held else drawn(path, x)
            return held[key]

        params = pytree.map_with_path(get, layer_params)
        self._held = held
        return fn(params, *args)


@cache
def _block() -> Tensor:
    return torch.randn(BLOCK, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def drawn(path: str, x: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    scale = x.shape[-1] ** -0.5 if x.dim() > 1 else 0.5
    block = (_block() * scale).to(dtype).roll(crc32(path.encode()) % BLOCK)
    return block.repeat(-(-x.numel() // BLOCK))[: x.numel()].view(x.shape)


def _differs(whole: _Run, part: _Run, rows: slice) -> str | None:
    """In words, what of a half's run is not the half of the whole run."""
    if len(whole.calls) != len(part.calls):
        return f"it attends {len(whole.calls)} times on a whole row and {len(part.calls)} times on a slice"
    for (kind, *expected), (_, *actual) in zip(whole.calls, part.calls, strict=True):
        for what, a, b in zip(("queries", "keys", "values"), expected, actual, strict=True):
            if not close(a[:, :, rows], b):
                return f"{kind} hands {what} to attention that depend on other positions"
    if not close(whole.logits[:, rows], part.logits):
        return "its logits depend on other positions by more than attention"
    return None


def _same(whole: list[Tensor], part: list[Tensor], rows: slice) -> bool:
    """Whether a module's outputs on a half are those of the whole, as far as a sequence dim can be told in them."""
    half = rows.stop - rows.start
    for a, b in zip(whole, part, strict=False):
        if a.dim() != b.dim() or not a.is_floating_point():
            continue
        dims = [d for d in range(a.dim()) if a.shape[d] == TOKENS and b.shape[d] == half]
        if len(dims) == 1 and not close(a.narrow(dims[0], rows.start, half), b):
            return False
    return True


def close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    a, b = a.double(), b.double()
    peak = max((float(x.abs().max()) for x in (a, b) if x.numel()), default=0.0)
    return not a.numel() or bool((a - b).abs().max() <= TOLERANCE * peak)
