"""The vocabulary: what a model function takes and gives, and how its parameters may be split.

Dimension words, used in every signature and docstring:

    batch       rows of the batch          seq, seq_local      tokens of the whole row, of this rank's slice
    heads       query heads                kv_heads            key and value heads (grouped-query attention)
    dim         size of a head             hidden              width of the residual stream
    vocab       size of the vocabulary     ..._local           the part that one rank holds

`axis` is a mesh axis (a name), `dim` a tensor dimension, without exception.

A ModelFn is `(params, inputs, ops=fcp.LOCAL) -> Output(loss, logits)`: a pure function of a parameter pytree and a
batch. It knows no axis. What may run in parallel it asks of `ops`. A transform takes a ModelFn and returns one.

How the leaves of `params` may be split over a tensor-parallel axis is data too: *rules*, a mapping from path patterns
(`model.layers.*.self_attn.q_proj.weight`) to one of the four records at the end of this file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor

from fcp import pytree

if TYPE_CHECKING:
    from fcp.masks import Mask
    from fcp.ops import Ops

__all__ = [
    "IGNORED",
    "Expert",
    "Inputs",
    "ModelFn",
    "Output",
    "Params",
    "Replicated",
    "Rule",
    "Rules",
    "Shared",
    "Split",
]

Params = Any
"""A pytree of tensors (nested dicts and lists)."""

IGNORED = -100
"""The target of a token that has none (Hugging Face's value)."""


@pytree.node()
@dataclass(frozen=True)
class Output:
    """What a model gives. It unpacks as the pair `loss, logits`.

    Attributes:
        loss: a scalar, whatever is to be minimised (a router's auxiliary loss included); None without labels.
        logits: [batch, seq, vocab], or None.
        statistics: what else is known of the whole batch, by name, no gradient through it (a router's
            `tokens_per_expert` [layers, experts], int64, and `auxiliary_loss`). The model sums over the tokens
            by `ops.total`, so that each is the same on every rank and a transform only hands it on.
    """

    loss: Any  # Any: a pytree may hold something else in each leaf's place
    logits: Any
    statistics: Any = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.loss, self.logits))


@pytree.node()
@dataclass(frozen=True)
class Inputs:
    """A prepared batch. `fcp.prepare` makes it from a Hugging Face-style dict.

    Attributes:
        tokens: [batch, seq_local], int64 token ids; None where `embeds` are given.
        embeds: [batch, seq_local, hidden], input embeddings in the place of tokens.
        positions: [batch, seq_local], int64 position ids, what rotary and learned positions read.
        targets: [batch, seq_local], int64, already shifted: the token that each position is to predict, or IGNORED.
            None where the batch has no labels.
        mask: the description of the *whole* sequence's mask; sliced along the batch, never along the sequence.
        num_targets: int64 scalar, the number of targets of the whole global batch, counted once.
        num_positions: int64 scalar, the largest position id of the whole global batch plus one (what rope scaling
            that depends on the length reads; a slice must not recompute it).
        real: [batch, seq_local], bool, False for padding, which no statistic of tokens counts; None where every token
            is real.
    """

    tokens: Int[Tensor, "batch seq_local"] | None
    embeds: Float[Tensor, "batch seq_local hidden"] | None
    positions: Int[Tensor, "batch seq_local"]
    targets: Int[Tensor, "batch seq_local"] | None
    mask: "Mask"
    num_targets: Int[Tensor, ""]
    num_positions: Int[Tensor, ""]
    real: Bool[Tensor, "batch seq_local"] | None = None


@runtime_checkable
class ModelFn(Protocol):
    """A model as a pure function."""

    def __call__(self, params: Params, inputs: "Inputs | Mapping[str, Any]", ops: "Ops" = ..., /) -> Output: ...


@dataclass(frozen=True)
class Split:
    """The leaf is cut along `dim` into equal slices, one a rank.

    Attributes:
        dim: the tensor dimension that is cut.
        blocks: the number of equal blocks (heads, say) along `dim` that must stay whole; the axis size must divide
            it. None: `dim`'s own size.
        pieces: the sizes of the logical matrices that a fused leaf holds one after another along `dim` (a fused
            query-key-value matrix, say). Each piece is cut on its own, so that every rank gets a slice of each.
        vocab: `dim` is the vocabulary, of this many tokens; it is padded with zeros where the ranks do not divide it.
    """

    dim: int
    blocks: int | None = None
    pieces: tuple[int, ...] | None = None
    vocab: int | None = None


@dataclass(frozen=True)
class Replicated:
    """Every rank holds the whole leaf and does the same work with it: its gradient needs no sum."""


@dataclass(frozen=True)
class Shared:
    """Every rank holds the whole leaf and uses it in split work (a per-head norm, say): its gradient is a sum."""


@dataclass(frozen=True)
class Expert:
    """Dim 0 of the leaf counts experts, `num` of them. It is cut along ep, and never along a tensor-parallel axis."""

    num: int


Rule = Split | Replicated | Shared | Expert
"""How one leaf may be split: `Split`, `Replicated`, `Shared` or `Expert`."""

Rules = Mapping[str, Rule]
"""Path patterns (`model.layers.*.self_attn.q_proj.weight`) to the rule of the leaves that match."""
