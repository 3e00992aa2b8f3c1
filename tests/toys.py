"""What many tests share: the toy model T of the case collection, its batches, and ways to compare.

T: vocab 64, width 32, 2 layers, 4 query and 2 kv heads of 8, float64. Every parameter is drawn at random, biases and
norms too, since one that is zero or one hides what happens to it.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

import fcp
from fcp import pytree
from models import llama

PACK8 = [0, 1, 2, 0, 1, 2, 3, 4]
"""One row of documents of 3 and 5; at cp 2 the second crosses the shard edge, and rank 1's slice has no zero in it."""


def toy(seed: int = 0, **overrides: Any) -> tuple[fcp.Model, Any]:
    """T and its parameters; `overrides` are fields of llama.Config."""
    model = llama.tiny(**overrides)
    return model, randomized(model, seed)


def randomized(model: fcp.Model, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """Parameters of `model` with every leaf random, of a size that makes every gradient count."""
    generator = torch.Generator().manual_seed(seed + 1)

    def shake(x: Tensor) -> Tensor:
        return x + 0.2 * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(dtype)

    return pytree.map(shake, model.init(seed=seed, dtype=dtype))


def tokens(batch: int, seq: int, *, vocab: int = 64, seed: int = 0) -> Tensor:
    return torch.randint(0, vocab, (batch, seq), generator=torch.Generator().manual_seed(seed))


def batch_of(ids: Tensor, **more: Any) -> dict[str, Any]:
    """A batch whose labels are its tokens."""
    return {"input_ids": ids, "labels": ids, **more}


def gradient(fn: Any, params: Any, batch: Any) -> Any:
    """torch.func.grad of the loss."""
    return torch.func.grad(lambda p: fn(p, batch).loss)(params)


def worst_error(expected: Any, actual: Any) -> float:
    """The largest relative error of two pytrees' leaves, paired by path; inf where the paths differ."""
    if pytree.paths(expected) != pytree.paths(actual):
        return float("inf")
    pairs = zip(pytree.leaves(expected), pytree.leaves(actual), strict=True)
    return max((fcp.relative_error(a, b) for a, b in pairs), default=0.0)


LEVELS = [dims for dims in itertools.product([None, 0], repeat=4) if any(dim is not None for dim in dims)]
"""Where two levels of ranks lie in two operands: (of the first, of the second) inside, then outside; None: nowhere."""


def error_at_two_levels(wanted: Any, found: Any, x: Tensor, w: Tensor, dims: tuple[int | None, ...]) -> float:
    """The worst error of the gradients of two functions of (x, w), both mapped over the levels of `dims`."""
    x_in, w_in, x_out, w_out = dims
    for axis, (x_dim, w_dim) in enumerate([(x_in, w_in), (x_out, w_out)]):
        x = x if x_dim is None else torch.stack([x, x * 2 + axis])
        w = w if w_dim is None else torch.stack([w, w * 3 - axis])

    def nested(of: Any) -> Any:
        fn = of
        for x_dim, w_dim in ((x_in, w_in), (x_out, w_out)):
            if (x_dim, w_dim) != (None, None):
                fn = torch.func.vmap(fn, (x_dim, w_dim))
        return torch.func.grad(lambda x, w: torch.sin(fn(x, w)).sum(), (0, 1))(x, w)

    return worst_error(nested(wanted), nested(found))
