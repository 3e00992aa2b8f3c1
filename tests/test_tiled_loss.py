"""The loss in tiles of tokens: the plain loss's values and gradients, and never all logits at once."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import fcp
from fcp import _tiled_loss
from fcp._tiled_loss import tiled_losses
from fcp.loss import cap, token_losses
from fcp.ops import LOCAL
from fcp.typing import IGNORED
from tests.tolerances import FLOAT64

VOCAB, WIDTH = 13, 6
Loss = Callable[..., Tensor]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(batch: int = 2, seq: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    targets = torch.randint(0, VOCAB, (batch, seq), generator=torch.Generator().manual_seed(1))
    targets[:, 2] = IGNORED
    targets[0, :2] = torch.tensor([0, VOCAB - 1])
    return random(batch, seq, WIDTH, seed=2), random(VOCAB, WIDTH, seed=3), targets


def plain(hidden: Tensor, table: Tensor, targets: Tensor, *, softcap: float | None = None, **slices: Any) -> Tensor:
    return token_losses(cap(hidden @ table.mT, softcap), targets, **slices)


def results(loss: Loss, hidden: Tensor, table: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """The losses, and both gradients of a sum in which no two tokens weigh the same."""
    weights = random(*targets.shape, seed=5)

    def weighed(hidden: Tensor, table: Tensor) -> Tensor:
        return (loss(hidden, table, targets, **options) * weights).sum()

    return loss(hidden, table, targets, **options), *grad(weighed, argnums=(0, 1))(hidden, table)


def worst(wanted: tuple[Tensor, ...], got: tuple[Tensor, ...]) -> float:
    return max(fcp.relative_error(w, g) for w, g in zip(wanted, got, strict=True))


# --- values and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("tile", [1, 3, 7, 100, None])
def test_every_tile_gives_the_plain_loss(tile: int | None, softcap: float | None) -> None:
    """A tile counted twice or never, a last tile that is cut short, a cap without its slope."""
    wanted = results(plain, *problem(), softcap=softcap)
    assert worst(wanted, results(tiled_losses, *problem(), tile=tile, softcap=softcap)) < FLOAT64


@pytest.mark.parametrize("shape", [(7,), (2, 2, 3)])
def test_any_shape_of_tokens(shape: tuple[int, ...]) -> None:
    """Tokens that come back in another order than they went in."""
    hidden, table, targets = problem(1, 12)
    count = torch.Size(shape).numel()
    hidden, targets = hidden[0, :count].reshape(*shape, WIDTH), targets[0, :count].reshape(shape)
    assert (
        worst(results(plain, hidden, table, targets), results(tiled_losses, hidden, table, targets, tile=4)) < FLOAT64
    )


def test_bfloat16_is_summed_in_float32() -> None:
    """A table's gradient that is rounded at every tile: with as many tiles as tokens it would stop growing."""
    hidden, table, _ = problem(1, 512)
    hidden = hidden.abs().to(torch.bfloat16)
    targets = torch.full((1, 512), 3)

    def gradient(loss: Loss, *operands: Tensor, **options: Any) -> Tensor:
        return grad(lambda table: loss(operands[0], table, targets, **options).sum())(operands[1])

    wanted = gradient(plain, hidden.double(), table.to(torch.bfloat16).double())
    found = gradient(tiled_losses, hidden, table.to(torch.bfloat16), tile=1)
    assert found.dtype == torch.bfloat16
    assert fcp.relative_error(wanted, found.double()) < 2**-7
    assert tiled_losses(hidden, table.to(torch.bfloat16), targets).dtype == torch.float32


def test_no_target_at_all_gives_zero() -> None:
    """0 / 0, or a gradient of tokens that predict nothing."""
    hidden, table, targets = problem()
    found = results(tiled_losses, hidden, table, torch.full_like(targets, IGNORED), tile=3)
    assert not any(bool(x.any()) for x in found)


def test_a_token_without_target_is_selected_away() -> None:
    """NaN at a padded position, times zero."""
    hidden, table, targets = problem()
    wanted = tiled_losses(hidden, table, targets, tile=3)
    spoiled = hidden.clone()
    spoiled[:, 2] = float("nan")
    assert torch.equal(tiled_losses(spoiled, table, targets, tile=3), wanted)
    gradient = grad(lambda x: tiled_losses(x, table, targets, tile=3).sum())(spoiled)
    assert not bool(gradient[:, 2].any()) and bool(gradient.isfinite().all())


def test_a_target_outside_the_vocabulary_is_no_plausible_loss() -> None:
    """A label beyond the table that adds the log-sum-exp alone."""
    hidden, table, targets = problem()
    targets[0, 0] = VOCAB
    losses = tiled_losses(hidden, table, targets, tile=3)
    assert float(losses[0, 0]) == float("inf") and bool(losses.flatten()[1:].isfinite().all())


@pytest.mark.parametrize(
    "way", [torch.func.grad, lambda fn: lambda x: fcp.value_and_grad(fn)(x)[1]], ids=["func", "fcp"]
)
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_gradient_that_forward_makes(softcap: float | None, way: Any) -> None:
    """A cotangent that is not multiplied in; a gradient of the losses, where that of their sum is made with it."""
    hidden, table, targets = problem()

    def weighed(loss: Loss) -> Callable[..., Tensor]:
        return lambda params: 3 * loss(*params, targets, softcap=softcap) - 2

    def summed(*operands: Any, **options: Any) -> Tensor:
        return plain(*operands, **options).sum()

    wanted = way(weighed(summed))((hidden, table))
    for tile in (1, 3, 100):

        def total(*operands: Any, tile: int = tile, **options: Any) -> Tensor:
            return _tiled_loss.tiled_total(*operands, tile=tile, **options)

        assert fcp.relative_error(summed(hidden, table, targets), total(hidden, table, targets)) < FLOAT64
        assert worst(wanted, way(weighed(total))((hidden, table))) < FLOAT64
    targets[0, 0] = VOCAB
    assert float(total(hidden, table.requires_grad_(), targets).detach()) == float("inf")


# --- slices of the vocabulary -----------------------------------------------------------------------------------------


def over_slices(loss: Loss, tp: int, pad: int = 0, **options: Any) -> Loss:
    """`loss` with the vocabulary, and `pad` rows that are none, cut over `tp` simulated ranks."""

    def on_rank(hidden: Tensor, table: Tensor, targets: Tensor) -> Tensor:
        local = fcp.shard(table, "tp", dim=0)
        first = fcp.axis_index("tp") * local.shape[0]
        more = {"vocab": VOCAB} if pad else {}
        joined = {"reduce_max": lambda x: fcp.pmax(x, "tp"), "reduce_sum": lambda x: fcp.psum(x, "tp")}
        return loss(fcp.pvary(hidden, "tp"), local, targets, first=first, **more, **{**joined, **options})

    def whole(hidden: Tensor, table: Tensor, targets: Tensor) -> Tensor:
        rows = torch.cat([table, table.new_full((pad, WIDTH), 9.0)])
        return fcp.simulate(on_rank, tp=tp)(hidden, rows, targets)

    return whole


@pytest.mark.parametrize(("tp", "pad"), [(1, 0), (13, 0), (2, 1), (3, 2), (4, 3), (5, 7)])
def test_slices_of_the_vocabulary_give_the_whole_loss(tp: int, pad: int) -> None:
    """A maximum or sum that stays on its rank; a row of padding that takes weight, or a slice of padding alone."""
    wanted = results(plain, *problem())
    hidden, table, targets = problem()
    assert worst(wanted, results(over_slices(tiled_losses, tp, pad, tile=3), hidden, table, targets)) < FLOAT64


def test_a_slice_of_padding_does_not_set_the_maximum() -> None:
    """A stand-in for the -inf of padding that is larger than every real logit, under which their sum is 0."""
    hidden, table, targets = problem()
    hidden, table = hidden.abs() * 100, -table.abs()  # every logit far below 0
    wanted = results(plain, hidden, table, targets)
    assert worst(wanted, results(over_slices(tiled_losses, 5, 7, tile=3), hidden, table, targets)) < FLOAT64


def test_all_tiles_send_one_maximum_and_one_sum() -> None:
    """A collective a tile."""
    calls: list[str] = []

    def count(name: str) -> Callable[[Tensor], Tensor]:
        return lambda x: (calls.append(name), x)[1]

    results(tiled_losses, *problem(), tile=2, reduce_max=count("max"), reduce_sum=count("sum"))
    assert calls == ["max", "sum"] * 2  # the loss, and the loss that is differentiated


# --- vmap, and what is refused ----------------------------------------------------------------------------------------


DIMS = [dims for dims in itertools.product([None, 0, 2], [None, 0], [None, 1]) if any(d is not None for d in dims)]


@pytest.mark.parametrize("dims", DIMS)
def test_vmap_is_a_loop(dims: tuple[int | None, ...]) -> None:
    """A rank dim taken for tokens, a table's gradient of one rank given to another."""
    operands, ranks = list(problem()), 3
    for i, dim in enumerate(dims):
        if dim is not None:
            operands[i] = torch.stack([operands[i], operands[i].flip(0), operands[i].roll(1, 0)], dim)
    weights = random(2, 7, seed=5)

    def total(hidden: Tensor, table: Tensor, targets: Tensor, loss: Loss = tiled_losses, **options: Any) -> Tensor:
        return (loss(hidden, table, targets, **options) * weights).sum()

    def both(*operands: Tensor) -> tuple[Tensor, ...]:
        return total(*operands, tile=3), *grad(lambda *x: total(*x, tile=3), argnums=(0, 1))(*operands)

    wanted = []
    for r in range(ranks):
        one = [x if dim is None else x.select(dim, r) for x, dim in zip(operands, dims, strict=True)]
        wanted.append((total(*one, loss=plain), *grad(lambda *x: total(*x, loss=plain), argnums=(0, 1))(*one)))
    stacked = tuple(torch.stack(x) for x in zip(*wanted, strict=True))
    assert worst(stacked, vmap(both, in_dims=dims)(*operands)) < FLOAT64

    outside = grad(lambda h, t: vmap(lambda *x: total(*x, tile=3), in_dims=dims)(h, t, operands[2]).sum(), (0, 1))
    for i, found in enumerate(outside(*operands[:2])):
        dim = dims[i]
        summed = stacked[i + 1].sum(0) if dim is None else stacked[i + 1].movedim(0, dim)
        assert fcp.relative_error(summed, found) < FLOAT64


def test_a_second_derivative_is_refused() -> None:
    """A gradient taken for a constant: a second derivative that is silently zero."""
    hidden, table, targets = problem()

    def squared(x: Tensor) -> Tensor:
        return grad(lambda x: tiled_losses(x, table, targets).sum())(x).square().sum()

    def squared_total(x: Tensor) -> Tensor:
        return grad(lambda x: _tiled_loss.tiled_total(x, table, targets))(x).square().sum()

    for fn in (squared, squared_total):
        with pytest.raises(ValueError, match=r"second derivative through the loss in tiles.*logits=True"):
            grad(fn)(hidden)


# --- never all logits -------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The largest tensor that an operator makes whose last dim is the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor) and x.dim() and x.shape[-1] == VOCAB:
                self.rows = max(self.rows, x.numel() // VOCAB)
        return out


def rows_at_once(loss: Loss) -> int:
    hidden, table, targets = problem()
    with Largest() as largest:
        fcp.value_and_grad(lambda params: loss(*params, targets).sum())((hidden, table))
    return largest.rows


def test_the_logits_of_all_tokens_never_lie_in_memory() -> None:
    """A tile that is kept, forward or backward; and the mutant, the plain loss, is noticed."""
    assert rows_at_once(lambda h, t, y: tiled_losses(h, t, y, tile=3)) == WIDTH  # of the table's transpose
    assert rows_at_once(plain) == 14


def test_many_logits_are_tiled_where_nobody_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles for a few logits, or none for many; logits that were asked for and do not come."""

    def rows(**options: Any) -> int:
        return rows_at_once(lambda h, t, y: LOCAL.loss(h, t, y, **options)[0])

    assert rows() == rows(logits=False) == 14
    monkeypatch.setattr(_tiled_loss, "TILE_ENTRIES", 2 * VOCAB)
    assert rows(logits=False) == WIDTH
    assert rows() == 14
    assert LOCAL.loss(*problem(), logits=True)[1].shape == (2, 7, VOCAB)


def test_a_tile_is_refused_where_logits_are_there() -> None:
    """A tile that changes nothing."""
    hidden, table, targets = problem()
    with pytest.raises(ValueError, match=r"tiles of 3 tokens, and the logits .*pass logits=False"):
        LOCAL.loss(hidden, table, targets, tile=3)
    with pytest.raises(ValueError, match="the model gives logits itself"):
        LOCAL.loss(hidden @ table.mT, None, targets, logits=False, tile=3)


# --- mutants ----------------------------------------------------------------------------------------------------------


def test_every_mutant_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice's sum that is not brought to the common maximum; a gradient without the target's part."""
    wanted = results(plain, *problem())

    def peaks_apart(*operands: Any, **options: Any) -> Tensor:
        return tiled_losses(*operands, **{**options, "reduce_max": lambda x: x})

    def faulty(loss: Loss) -> float:
        return worst(wanted, results(over_slices(loss, 2, 1, tile=3), *problem()))

    assert faulty(tiled_losses) < FLOAT64
    assert faulty(peaks_apart) > 1e-3
    right = _tiled_loss._gradient_of_tile
    monkeypatch.setattr(
        _tiled_loss, "_gradient_of_tile", lambda s, total, picked, *rest: right(s, total, 0 * picked, *rest)
    )
    assert faulty(tiled_losses) > 1e-3
