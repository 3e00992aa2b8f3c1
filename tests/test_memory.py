"""What holds less memory computes the same: tiles, remat policies, in every mesh, and does hold less."""

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fcp
from fcp import _host, _kept, kernels, pytree
from fcp._planned import PLANNED
from models import gpt_oss
from tests.grid import SEQ, batch, model_of, reference
from tests.tolerances import FLOAT64
from tests.toys import batch_of, gradient, tokens, toy, worst_error

HEADS = (8, 4)
MESHES: tuple[dict[str, int], ...] = (
    {},
    {"cp": 2},
    {"tp": 2},
    {"fsdp": 2},
    {"cp": 2, "tp": 2},
    {"cp": 2, "tp": 2, "fsdp": 2},
)


@dataclass(frozen=True)
class Case:
    family: str
    mask: str
    mesh: dict[str, int]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        parts = [f"{key}={value}" for key, value in {**self.mesh, **self.options}.items() if key != "logits"]
        return "-".join([self.family, self.mask.replace(" ", "_"), *parts])


def cases() -> Iterator[Case]:
    """Tiles of one, of a few and of more tokens than there are; 61 words, which no tp divides; 11 tokens."""
    for index, mesh in enumerate(MESHES):
        tile = (1, 3, 5, 100)[index % 4]
        yield Case("llama", "packed", mesh, {"logits": False, "loss_tile": tile})
        yield Case("qwen3", "left pad", mesh, {"remat": "attention"})
        yield Case("gpt_neox", "causal", mesh, {"mlp_tile": tile})
    for mesh in ({"cp": 2, "tp": 2}, {"fsdp": 2}):
        for policy in ("nothing", "attention", "layer"):
            yield Case("smollm", "packed", mesh, {"remat": policy, "logits": False, "loss_tile": 4, "mlp_tile": 2})
            yield Case("gemma2", "right pad", mesh, {"remat": policy, "logits": False, "loss_tile": 7})
    yield Case("gpt2", "causal", {"cp": 2, "tp": 2}, {"mlp_tile": 3, "remat": "attention"})
    yield Case("gpt_oss", "window", {"cp": 2, "tp": 2}, {"remat": "attention"})  # sinks change what the kernel gave
    yield Case("deepseek_v3", "packed", {"tp": 2}, {"remat": "attention", "mlp_tile": 4})


def check(model: Any, params: Any, inputs: Any, expected: Any, grads: Any, mesh: Any, options: Any) -> None:
    sharded = fcp.transform(model, **mesh, **options)
    assert fcp.relative_error(expected.loss, sharded(params, inputs).loss) < FLOAT64
    assert worst_error(grads, gradient(sharded, params, inputs)) < FLOAT64
    inside = fcp.value_and_grad(sharded.model_fn)
    out, found = (fcp.simulate(inside, **sharded.axes) if mesh else inside)(params, fcp.prepare(inputs))
    assert fcp.relative_error(expected.loss, out.loss) < FLOAT64
    assert worst_error(grads, found) < FLOAT64


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_same_loss_and_gradients(case: Case) -> None:
    """A tile or a kept result that is another rank's or another layer's, forward or in a replay."""
    model, params = model_of(case.family, case.mask, HEADS)
    expected = reference(case.family, case.mask, HEADS)
    check(model, params, batch(case.mask), *expected, case.mesh, case.options)


@pytest.mark.parametrize("mesh", MESHES[1:5], ids=str)
def test_no_targets_at_all(mesh: dict[str, int]) -> None:
    """0 / 0 in a tile, or on a rank."""
    model, params = toy(vocab_size=61)
    inputs = {**batch_of(tokens(2, SEQ, vocab=61)), "labels": torch.full((2, SEQ), -100)}
    options = {"logits": False, "loss_tile": 3, "remat": "attention"}
    out, grads = fcp.value_and_grad(fcp.transform(model, **mesh, **options))(params, inputs)
    assert float(out.loss) == 0 and not any(bool(g.any()) for g in pytree.leaves(grads))


def test_bfloat16_stays_bfloat16() -> None:
    """A kept result, or a tile's gradient, of another dtype."""
    model = toy()[0]
    params = model.init(seed=0, dtype=torch.bfloat16)
    sharded = fcp.transform(model, cp=2, tp=2, remat="attention", logits=False, loss_tile=3, mlp_tile=3)
    out, grads = fcp.value_and_grad(sharded)(params, batch_of(tokens(2, SEQ)))
    wanted, wanted_grads = fcp.value_and_grad(model)(params, batch_of(tokens(2, SEQ)))
    assert out.loss.dtype == torch.float32 and fcp.relative_error(wanted.loss, out.loss) < 2**-7
    assert all(g.dtype == torch.bfloat16 for g in pytree.leaves(grads))
    assert worst_error(wanted_grads, grads) < 0.1


# --- what runs, and what is held --------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry a run of the attention kernel's forward, while it is the kernel "counted"."""
    calls: list[int] = []

    def forward(*operands: Any) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return PLANNED.forward(*operands)

    monkeypatch.setitem(kernels._registry, "counted", kernels.Kernel(forward, PLANNED.backward))
    return calls


@pytest.mark.parametrize("mesh", [{}, {"cp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("way", ["value_and_grad", "torch.func.grad", "inside"])
def test_a_kept_attention_runs_once(way: str, mesh: dict[str, int], counted: list[int]) -> None:
    """A policy of the name only; and the mutant, a tape that nobody reads, is noticed."""
    model, params = toy()
    prepared = fcp.prepare(batch_of(tokens(2, 8)))

    def runs(policy: str) -> int:
        counted.clear()
        sharded = fcp.transform(model, **mesh, remat=policy, kernel="counted")
        if way == "value_and_grad":
            fcp.value_and_grad(sharded)(params, prepared)
        elif way == "torch.func.grad" or not mesh:
            gradient(sharded, params, prepared)
        else:
            fcp.simulate(fcp.value_and_grad(sharded.model_fn), **sharded.axes)(params, prepared)
        return len(counted)

    assert [runs(policy) for policy in ("nothing", "attention", "layer")] == [2, 2, 4]


def test_a_tape_is_read_once() -> None:
    """A second backward through one graph that finds the first one's tape empty, or half read."""
    model, params = toy()
    sharded = fcp.transform(model, remat="attention")
    leaves = [x.requires_grad_() for x in pytree.leaves(pytree.map(Tensor.clone, params))]
    _, spec = pytree.flatten(params)
    loss = sharded(pytree.unflatten(spec, leaves), batch_of(tokens(2, 8))).loss
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert worst_error(list(first), list(torch.autograd.grad(loss, leaves))) == 0


def test_another_layers_result_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: results that a replay reads in another order than they were written in."""
    model, params = toy()

    def twice(fn: Any) -> Any:
        def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Tensor:
            return fn(q, k, v, mask, **options) + 0.5 * fn(q, k, v * v, mask, **options)

        return attention

    def run(inner: Any, params: Any, inputs: Any, ops: Any) -> Any:
        return inner(params, inputs, fcp.sharded.replace(ops, attention=twice(ops.attention)))

    changed = fcp.sharded.Sharded(model, "twice", run)
    inputs = batch_of(tokens(2, 8))
    wanted = gradient(changed, params, inputs)
    sharded = fcp.transform(changed, remat="attention", cp=2)
    assert worst_error(wanted, gradient(sharded, params, inputs)) < FLOAT64

    class Backwards(list):
        def popleft(self) -> Any:
            return self.pop()

    monkeypatch.setattr(
        _kept.Tape, "__init__", lambda self, kinds: vars(self).update(kinds=kinds, held=Backwards(), written=False)
    )
    assert worst_error(wanted, gradient(sharded, params, inputs)) > 1e-3


class Widest(TorchDispatchMode):
    """The most tokens of which the MLP's inner activation was made in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.silu:
            self.tokens = max(self.tokens, math.prod(out.shape[:-1]))
        return out


@pytest.mark.parametrize("policy", ["nothing", "layer"])
def test_an_mlp_in_tiles_is_never_whole(policy: str) -> None:
    """Tiles that a replay of the layer joins again."""
    model, params = toy()

    def most(**options: Any) -> int:
        with Widest() as widest:
            fcp.value_and_grad(fcp.transform(model, remat=policy, **options))(params, batch_of(tokens(2, 8)))
        return widest.tokens

    assert most(mlp_tile=6) == 6  # 3 tokens of each of 2 rows
    assert most() == 16


# --- refusals ---------------------------------------------------------------------------------------------------------

MODEL, PARAMS = toy()
BATCH = batch_of(tokens(2, 8))
UNCHECKED = inspect.unwrap(fcp.transform)  # as a user calls it, without the suite's own type checks


class Cpus:
    device_type = "cpu"
    mesh_dim_names = ("cp",)

    def size(self, dim: int) -> int:
        return 2


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "an unknown policy": (
        lambda: UNCHECKED(MODEL, remat="mlp"),
        "remat='mlp'; the policies are 'nothing', 'attention'",
    ),
    "an unknown policy by hand": (lambda: fcp.rematerialize(torch.sin, policy="all"), "one of 'layer', 'attention'"),
    "tiles of no tokens": (lambda: fcp.transform(MODEL, mlp_tile=0), "mlp_tile=0 must be a number of tokens"),
    "a tiled loss with logits": (lambda: fcp.transform(MODEL, loss_tile=8), "loss_tile=8, .* pass logits=False"),
    "a model without MLPs": (
        lambda: fcp.transform(gpt_oss.tiny(), mlp_tile=8)(gpt_oss.tiny().init(), BATCH),
        r"mlp_tile=8, and the model never called ops\.tokenwise",
    ),
    "nothing to offload": (lambda: fcp.transform(MODEL, offload=True), "choose a remat policy"),
    "offload on a mesh of CPUs": (
        lambda: fcp.transform(MODEL, cp=2, mesh=Cpus(), remat="layer", offload=True),
        "on a mesh of CPUs, whose activations are on the host already",
    ),
    "offload on the CPU": (
        lambda: fcp.transform(MODEL, remat="layer", offload=True)(PARAMS, BATCH),
        "the batch is on cpu: activations are on the host already",
    ),
    "offload on the CPU by hand": (
        lambda: fcp.rematerialize(torch.mul, offload=True)(torch.ones(2), torch.ones(2, requires_grad=True)),
        "the input is on cpu: it is on the host already",
    ),
    "offload under torch.func": (
        lambda: torch.func.grad(lambda x: fcp.rematerialize(torch.mul, offload=True)(x, x).sum())(torch.ones(2)),
        r"under a derivative of torch\.func.*fcp\.value_and_grad",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """A setting that changes nothing, or is taken for another one."""
    attempt, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        attempt()


def test_true_and_false_name_policies() -> None:
    """Callers of before who get something else."""
    assert repr(fcp.transform(MODEL, remat=True)) == repr(fcp.transform(MODEL, remat="layer"))
    assert repr(fcp.transform(MODEL, remat=False)) == repr(fcp.transform(MODEL))


# --- on the host ------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_inputs_on_the_host() -> None:
    """A copy that is read before it is there, or memory of the device that is given away before it was copied."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU is here")
    model, params = toy(num_hidden_layers=8)
    inputs = batch_of(tokens(2, 8))
    wanted = gradient(model, params, inputs)
    on_gpu = pytree.map(lambda x: x.cuda(), params), {key: x.cuda() for key, x in inputs.items()}
    moved = []
    to_host = _host.to_host
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fcp.remat.to_host", lambda x: moved.append(x.shape) or to_host(x))
        sharded = fcp.transform(model, remat="attention", offload=True)
        _, grads = fcp.value_and_grad(sharded)(*on_gpu)
    assert worst_error(wanted, pytree.map(Tensor.cpu, grads)) < FLOAT64
    assert len(moved) == 9  # eight layers and the head
