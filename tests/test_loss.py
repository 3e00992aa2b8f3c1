"""Token losses against torch's cross entropy: values, gradients, selection, slices of the vocabulary, vmap."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vjp, vmap

import fcp
from fcp import loss
from fcp.loss import mean_loss, token_losses
from fcp.typing import IGNORED
from tests.tolerances import EXACT, FLOAT64

VOCAB = 12


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def logits_and_targets(batch: int = 2, seq: int = 5, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    targets = torch.randint(0, vocab, (batch, seq), generator=torch.Generator().manual_seed(1))
    targets[:, 2] = IGNORED
    return 3 * random(batch, seq, vocab), targets


def plain(logits: Tensor, targets: Tensor) -> Tensor:
    """torch's own, per token."""
    flat = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="none"
    )
    return flat.reshape(targets.shape)


def with_gradient(fn: Callable[..., Tensor], logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The losses, and the logits' gradient of their weighted sum; no two tokens weigh the same."""
    weights = random(*targets.shape, seed=3).to(torch.promote_types(logits.dtype, torch.float32))
    losses, pull = vjp(lambda x: fn(x, targets), logits)
    return losses, pull(weights.to(losses.dtype))[0]


def worst(wanted: tuple[Tensor, ...], got: tuple[Tensor, ...]) -> float:
    return max(fcp.relative_error(w, g) for w, g in zip(wanted, got, strict=True))


# --- values and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 5), (7,), (), (2, 2, 2)])
def test_token_losses_are_torchs_cross_entropy(shape: tuple[int, ...]) -> None:
    """Catches a wrong sign, a missing maximum or target, and a gradient that is not softmax minus one-hot."""
    logits = 3 * random(*shape, VOCAB)
    targets = torch.arange(max(1, torch.tensor(shape).prod().int())).reshape(shape) % VOCAB
    assert worst(with_gradient(plain, logits, targets), with_gradient(token_losses, logits, targets)) < FLOAT64


def test_targets_of_int32_serve() -> None:
    """Catches a gather that wants int64, or the ignored value lost in a cast."""
    logits, targets = logits_and_targets()
    narrow = targets.to(torch.int32)
    assert torch.equal(token_losses(logits, narrow), token_losses(logits, targets))


def test_float32_errs_by_its_rounding_alone() -> None:
    """Catches a loss that loses digits: the log of a sum of exponentials that were not shifted by the row's maximum."""
    logits, targets = logits_and_targets()
    wanted = with_gradient(plain, logits.float().double(), targets)
    got = with_gradient(token_losses, logits.float(), targets)
    assert all(x.dtype == torch.float32 for x in got)
    assert worst(wanted, got) < 20 * 2**-24


@pytest.mark.parametrize("shape", [(2, 5), ()])
def test_bfloat16_logits_are_computed_in_float32(shape: tuple[int, ...]) -> None:
    """Catches a sum of exponentials or a picked logit in bfloat16, for rows of tokens and for a single one."""
    vocab = 4096  # a bfloat16 sum of so many terms stops growing early
    logits = random(*shape, vocab).to(torch.bfloat16)
    targets = torch.full(shape, 5)
    losses, gradient = with_gradient(token_losses, logits, targets)
    wanted, wanted_gradient = with_gradient(plain, logits.double(), targets)
    assert losses.dtype == torch.float32 and gradient.dtype == torch.bfloat16
    assert fcp.relative_error(wanted, losses) < 100 * 2**-24
    assert fcp.relative_error(wanted_gradient, gradient) < 2**-8  # one rounding, at the end
    with_rounding = plain(logits, targets).double()
    assert fcp.relative_error(wanted, with_rounding) > 1e-4, "rounded on the way, it would show"


def test_bfloat16_keeps_the_kernels_of_its_function_in_float32() -> None:
    """Catches a narrow dtype inside the Function, where the final cast would hide it."""
    logits, targets = logits_and_targets()
    logits = logits.to(torch.bfloat16)
    peak = logits.amax(-1).float()
    total, picked = loss._ExpSumAndPick.apply(logits, targets.clamp(min=0), peak, targets != IGNORED)
    assert total.dtype == picked.dtype == torch.float32


def test_huge_logits_do_not_overflow() -> None:
    """Catches exponentials of raw logits: inf minus inf, or a loss of 0 for what is certain to be wrong."""
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e30, -1e30, -1e30], [3e4, 3e4, 0.0]], dtype=torch.float64)
    targets = torch.tensor([1, 0, 0])
    losses, gradient = with_gradient(token_losses, logits, targets)
    log = torch.log(torch.tensor([2.0, 3.0], dtype=torch.float64))
    assert fcp.relative_error(torch.stack([torch.tensor(2e4).double(), log[1], log[0]]), losses) < FLOAT64
    assert bool(gradient.isfinite().all())
    assert bool(token_losses(logits.float(), targets).isfinite().all())


# --- what has no target -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_an_ignored_token_is_selected_away(poison: float) -> None:
    """Catches loss * mask (C-06): NaN times zero is NaN, in the loss and in what flows back."""
    logits, targets = logits_and_targets()
    wanted = with_gradient(token_losses, logits, targets)
    spoiled = logits.clone()
    spoiled[:, 2] = poison
    losses, gradient = with_gradient(token_losses, spoiled, targets)
    assert torch.equal(losses, wanted[0]) and torch.equal(gradient, wanted[1])
    assert not bool(losses[:, 2].any()) and not bool(gradient[:, 2].any())


def test_no_target_at_all_gives_zero() -> None:
    """Catches 0 / 0 in a mean over no targets (C-05), in the loss and in the gradient."""
    logits, targets = logits_and_targets()
    nothing = torch.full_like(targets, IGNORED)
    losses, gradient = with_gradient(token_losses, logits, nothing)
    assert not bool(losses.any()) and not bool(gradient.any())
    mean = mean_loss(losses.sum(), (nothing != IGNORED).sum())
    assert mean is not None and float(mean) == EXACT
    pulled = grad(lambda x: mean_loss(token_losses(x, nothing).sum(), torch.tensor(0)))(logits)
    assert not bool(pulled.any())


def test_mean_loss_divides_once_by_the_count_it_is_given() -> None:
    """Catches a mean over all tokens, and a loss invented where there are no labels."""
    assert float(mean_loss(torch.tensor(12.0), torch.tensor(8))) == 1.5
    assert mean_loss(None, torch.tensor(0)) is None


def test_a_target_outside_the_vocabulary_is_no_plausible_loss() -> None:
    """Catches a label beyond the vocabulary that adds the log-sum-exp alone: a wrong loss that looks right."""
    logits, targets = logits_and_targets()
    targets[0, 0] = VOCAB
    losses, _ = with_gradient(token_losses, logits, targets)
    assert float(losses[0, 0]) == float("inf")
    targets[0, 0] = IGNORED
    assert torch.equal(losses.flatten()[1:], token_losses(logits, targets).flatten()[1:])


# --- slices of the vocabulary -----------------------------------------------------------------------------------------


def over_slices(logits: Tensor, targets: Tensor, tp: int, inner: Callable[..., Tensor] = token_losses) -> Tensor:
    """The losses with the vocabulary cut over `tp` simulated ranks."""

    def on_rank(logits: Tensor) -> Tensor:
        local = fcp.shard(logits, "tp", dim=-1)
        return inner(
            local,
            targets,
            first=fcp.axis_index("tp") * local.shape[-1],
            reduce_max=lambda x: fcp.pmax(x, "tp"),
            reduce_sum=lambda x: fcp.psum(x, "tp"),
        )

    return fcp.simulate(on_rank, tp=tp)(logits)


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 12])
def test_slices_of_the_vocabulary_give_the_whole_loss(tp: int) -> None:
    """Catches a maximum, sum or target's logit that stays on its rank, and a target read from another slice."""
    logits, targets = logits_and_targets()
    targets[0, :2] = torch.tensor([0, VOCAB - 1])
    logits[:, 2] = float("nan")  # ignored, on every rank
    got = with_gradient(lambda x, t: over_slices(x, t, tp), logits, targets)
    assert worst(with_gradient(token_losses, logits, targets), got) < FLOAT64


def test_a_slice_that_holds_no_weight_is_harmless() -> None:
    """Catches exp(-inf - -inf) on a rank whose columns are all padding of the vocabulary."""
    logits, targets = logits_and_targets(vocab=6)
    hidden = torch.cat([logits, torch.full_like(logits, -float("inf"))], -1)
    losses, gradient = with_gradient(lambda x, t: over_slices(x, t, 2), hidden, targets)
    wanted, wanted_gradient = with_gradient(plain, logits, targets)
    assert worst((wanted, wanted_gradient), (losses, gradient[..., :6])) < FLOAT64
    assert not bool(gradient[..., 6:].any())


def test_a_slice_sends_one_sum_and_one_maximum() -> None:
    """Catches a collective for each of the numbers that travel together: every call costs, whatever its size."""
    logits, targets = logits_and_targets()
    calls: list[str] = []

    def count(name: str) -> Callable[[Tensor], Tensor]:
        return lambda x: (calls.append(name), x)[1]

    token_losses(logits, targets, reduce_max=count("max"), reduce_sum=count("sum"))
    assert calls == ["max", "sum"]


# --- vmap and second derivatives --------------------------------------------------------------------------------------

RANKS = 3


@pytest.mark.parametrize(
    "dims",
    [dims for dims in itertools.product([None, 0, 1, 2, 3], [None, 0, 2], [None, 0]) if dims != (None, None, None)],
)
def test_vmap_is_a_loop(dims: tuple[int | None, int | None, int | None]) -> None:
    """Catches an operand whose rank dim is taken for tokens, in values and in gradients inside and outside the map."""
    logits, targets = logits_and_targets()
    operands = [logits, targets, torch.tensor(2)]
    for i, dim in enumerate(dims):
        if dim is not None:
            others = [operands[i], operands[i].flip(0) if i < 2 else torch.tensor(0), operands[i] * 1]
            if i == 1:
                others[2] = torch.full_like(targets, IGNORED)
            operands[i] = torch.stack(others, dim)

    def total(logits: Tensor, targets: Tensor, first: Tensor) -> Tensor:
        losses = token_losses(logits, torch.where(targets < 0, targets, targets % 8 + first), first=first)
        return (losses * torch.arange(1.0, 6.0, dtype=torch.float64)).sum()

    def select(r: int) -> list[Tensor]:
        return [x if dim is None else x.select(dim, r) for x, dim in zip(operands, dims, strict=True)]

    wanted = [(total(*select(r)), grad(total)(*select(r))) for r in range(RANKS)]
    stacked = tuple(torch.stack(x) for x in zip(*wanted, strict=True))
    inside = vmap(lambda *x: (total(*x), grad(total)(*x)), in_dims=dims)(*operands)
    assert worst(stacked, inside) < FLOAT64
    outside = grad(lambda x: vmap(total, in_dims=dims)(x, *operands[1:]).sum())(operands[0])
    summed = stacked[1].sum(0) if dims[0] is None else stacked[1].movedim(0, dims[0])
    assert fcp.relative_error(summed, outside) < FLOAT64


def test_two_vmaps_are_two_loops() -> None:
    """Catches a rule that holds for one level (cp x tp)."""
    logits, targets = 3 * random(2, RANKS, 4, VOCAB), torch.arange(2 * 4).reshape(2, 4)
    pull = grad(lambda x, t: (token_losses(x, t) ** 2).sum())
    got = vmap(vmap(pull, in_dims=(0, None)))(logits, targets)
    wanted = [[pull(logits[a, b], targets[a]) for b in range(RANKS)] for a in range(2)]
    assert fcp.relative_error(torch.stack([torch.stack(row) for row in wanted]), got) < FLOAT64


def curvature(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A Hessian-vector product of a function of the losses that is not linear in them."""
    direction = random(*x.shape, seed=7)
    return grad(lambda x: (grad(lambda x: (fn(x) ** 2).sum())(x) * direction).sum())(x)


@pytest.mark.parametrize("tp", [None, 2, 3])
def test_second_derivatives_are_those_of_cross_entropy(tp: int | None) -> None:
    """Catches a gradient held constant, or one whose own gradient misses the normaliser, whole or in slices."""
    logits, targets = logits_and_targets()
    fn = token_losses if tp is None else (lambda x, t: over_slices(x, t, tp))
    wanted = curvature(lambda x: plain(x, targets), logits)
    assert fcp.relative_error(wanted, curvature(lambda x: fn(x, targets), logits)) < FLOAT64


def test_third_derivatives_are_those_of_cross_entropy() -> None:
    """Catches a second backward in operations that are no longer differentiable."""
    logits, targets = logits_and_targets()
    wanted = grad(lambda x: curvature(lambda y: plain(y, targets), x).square().sum())(logits)
    got = grad(lambda x: curvature(lambda y: token_losses(y, targets), x).square().sum())(logits)
    assert fcp.relative_error(wanted, got) < FLOAT64


def test_a_second_derivative_passes_by_ignored_tokens() -> None:
    """Catches NaN logits at an ignored token that come back in the second derivative."""
    logits, targets = logits_and_targets()
    wanted = curvature(lambda x: token_losses(x, targets), logits)
    logits[:, 2] = float("nan")
    assert torch.equal(curvature(lambda x: token_losses(x, targets), logits), wanted)


def test_autograd_without_torch_func() -> None:
    """Catches a Function that works under torch.func alone."""
    logits, targets = logits_and_targets()
    logits.requires_grad_()

    def twice(fn: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        (first,) = torch.autograd.grad((fn(logits, targets) ** 2).sum(), logits, create_graph=True)
        return first, torch.autograd.grad((first**2).sum(), logits)[0]

    assert worst(twice(plain), twice(token_losses)) < FLOAT64


# --- mutants ----------------------------------------------------------------------------------------------------------


def _multiplied_by_the_mask(logits: Tensor, targets: Tensor, **fixed: Any) -> Tensor:
    keep = targets != IGNORED
    return token_losses(logits, targets.clamp(min=0), **fixed) * keep


def _sum_stays_on_its_rank(logits: Tensor, targets: Tensor, **fixed: Any) -> Tensor:
    def only_what_is_picked(x: Tensor) -> Tensor:
        return torch.cat([x[:1], fixed["reduce_sum"](x)[1:]])

    return token_losses(logits, targets, **{**fixed, "reduce_sum": only_what_is_picked}).mean()


def _maximum_stays_on_its_rank(logits: Tensor, targets: Tensor, **fixed: Any) -> Tensor:
    return token_losses(logits, targets, **{**fixed, "reduce_max": lambda x: x})


def _first_is_always_zero(logits: Tensor, targets: Tensor, **fixed: Any) -> Tensor:
    return token_losses(logits, targets, **{**fixed, "first": 0})


def _unshifted_by_the_maximum(logits: Tensor, targets: Tensor, **fixed: Any) -> Tensor:
    return torch.where(targets == IGNORED, 0.0, torch.log(torch.exp(logits).sum(-1))) - logits.gather(
        -1, targets.clamp(min=0).unsqueeze(-1)
    ).squeeze(-1)


MUTANTS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "multiplied by the mask": (_multiplied_by_the_mask, 2),
    "the maximum of this slice alone": (_maximum_stays_on_its_rank, 2),
    "every slice taken for the first": (_first_is_always_zero, 2),
    "exponentials of raw logits": (_unshifted_by_the_maximum, 1),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_differs(name: str) -> None:
    """The comparison with the whole loss would be no witness if a faulty one passed it (C-06)."""
    mutant, tp = MUTANTS[name]
    logits, targets = logits_and_targets()
    logits[:, 2] = float("nan")
    logits[0, 0] += 1e4
    wanted = with_gradient(token_losses, logits, targets)
    right, faulty = (
        with_gradient(lambda x, t, inner=inner: over_slices(x, t, tp, inner), logits, targets)
        for inner in (token_losses, mutant)
    )
    assert worst(wanted, right) < FLOAT64
    assert worst(wanted, faulty) > 1e-6


def test_a_sum_that_stays_on_its_rank_is_an_error() -> None:
    """The simulator names the axis over which a loss still varies: a forgotten psum is no wrong number."""
    logits, targets = logits_and_targets()
    with pytest.raises(ValueError, match="still varies over axis 'tp'"):
        over_slices(logits, targets, 2, _sum_stays_on_its_rank)


def test_every_gradient_entry_is_softmax_minus_one_hot() -> None:
    """Catches a one-hot in a wrong column: checked entry by entry, since a sum over the vocabulary would be zero."""
    logits, targets = logits_and_targets()
    gradient = grad(lambda x: token_losses(x, targets).sum())(logits)
    softmax = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)
    for b, s in itertools.product(range(2), range(5)):
        wanted = softmax[b, s].clone()
        if int(targets[b, s]) == IGNORED:
            wanted.zero_()
        else:
            wanted[targets[b, s]] -= 1
        assert fcp.relative_error(wanted, gradient[b, s]) < FLOAT64
