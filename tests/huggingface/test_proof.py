"""The pointwise proof: what mixes positions outside of attention is found and named, what does not is let through."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fcp
from fcp import huggingface
from fcp.huggingface import _proof
from tests.huggingface.modules import module_of, tokens

pytest.importorskip("transformers")


class CausalConvolution(nn.Module):
    """Starts as zeros, as such layers do: then it mixes nothing, and hides."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, 1, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        padded = nn.functional.pad(x.mT, (2, 0))
        return x + nn.functional.conv1d(padded, self.weight, groups=x.shape[-1]).mT


class RecurrentScan(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) * 0.5 + x


class RotaryPositions(nn.Module):
    """Counts them itself, in the slice that it sees."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[1], dtype=x.dtype)[None, :, None]


class LinearAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ x.mT).tril() @ x


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


class Reversal(nn.Module):
    """The same set of positions on a whole row, which a test on sums would not see."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.flip(1)


class Bias(nn.Module):
    """Acts on each position: nothing to refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(32, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


def with_layer(made: nn.Module, layer: int = 1) -> Any:
    """A Llama one of whose MLPs is followed by something else."""
    module: Any = module_of("llama")
    module.model.layers[layer].mlp = nn.Sequential(module.model.layers[layer].mlp, made)
    return module


MIXING: list[tuple[Callable[[], nn.Module], str]] = [
    (CausalConvolution, "a convolution along the sequence"),
    (RecurrentScan, "a state that is carried along the sequence"),
    (RotaryPositions, "positions that are counted in the slice"),
    (LinearAttention, "attention of its own"),
    (Mean, "something from other positions"),
    (Reversal, "something from other positions"),
]


@pytest.mark.parametrize(("make", "what"), MIXING, ids=lambda x: getattr(x, "__name__", ""))
def test_what_mixes_positions_is_refused_by_name(make: Callable[[], nn.Module], what: str) -> None:
    """The module, its class and what it does; before anything runs, for cp, and for packed rows without cp too."""
    model, params = huggingface.functional(with_layer(make()))
    named = rf"model\.layers\.1\.mlp\.1 \({make.__name__}\) computes {what}"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=f"cannot be split: {named}"):
        fcp.transform(model, cp=2)
    with pytest.raises(ValueError, match="cannot be split"):
        fcp.shard_seq(model, axis="cp")
    positions = torch.arange(12).remainder(5).expand(2, -1)
    with pytest.raises(ValueError, match=f"packed documents or padding.*{named}"):
        model(params, {"input_ids": tokens(), "position_ids": positions})
    batch = {"input_ids": tokens(), "labels": tokens()}
    fcp.compare(model, fcp.transform(model, fsdp=2), params, batch).assert_close()  # the batch may be split


def test_what_acts_on_each_position_is_let_through() -> None:
    model, params = huggingface.functional(with_layer(Bias()))
    batch = {"input_ids": tokens(), "labels": tokens()}
    fcp.compare(model, fcp.transform(model, cp=2), params, batch).assert_close()


def test_without_the_proof_a_convolution_computes_something_else() -> None:
    """The mutant, and the proof skipped by name: the same fault, and nothing says so but the comparison."""
    module = with_layer(CausalConvolution())
    with torch.no_grad():
        module.model.layers[1].mlp[1].weight.fill_(0.3)
    model, params = huggingface.functional(module, skip_proof=True)
    batch = {"input_ids": tokens(), "labels": tokens()}
    assert not fcp.compare(model, fcp.transform(model, cp=2), params, batch).ok()


def test_a_proof_on_the_modules_own_parameters_would_miss_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why every parameter is drawn at random: a convolution of zeros mixes nothing."""
    real = _proof.drawn

    def zeros(path: str, x: Tensor) -> Tensor:
        return torch.zeros_like(real(path, x)) if x.dim() == 3 else real(path, x)

    monkeypatch.setattr(_proof, "drawn", zeros)
    module = with_layer(CausalConvolution())
    with torch.no_grad():
        module.model.layers[1].mlp[1].weight.fill_(0.3)
    model, params = huggingface.functional(module)
    batch = {"input_ids": tokens(), "labels": tokens()}
    assert not fcp.compare(model, fcp.transform(model, cp=2), params, batch).ok()


@pytest.mark.parametrize("kind", ["mamba", "rwkv", "recurrent_gemma", "zamba2", "xlstm", "jamba", "falcon_h1"])
def test_model_types_with_a_state_are_refused(kind: str) -> None:
    model, params = huggingface.functional(module_of(kind))
    with pytest.raises(ValueError, match=r"carry a state|cannot be split"):
        fcp.transform(model, cp=2)
    with pytest.raises(ValueError, match="packed documents or padding"):
        model(
            params,
            {"input_ids": tokens(), "attention_mask": torch.ones(2, 12).long().index_fill(1, torch.tensor(0), 0)},
        )


@pytest.mark.parametrize("sizes", [{"cp": 2}, {"fsdp": 2}], ids=str)
def test_control_flow_on_values_is_refused_in_the_simulator(sizes: dict[str, int]) -> None:
    """A loop over the experts that some token chose cannot run for several ranks at once; processes run it."""
    model, params = huggingface.functional(module_of("dbrx"))
    sharded = fcp.transform(model, **sizes)
    with pytest.raises(ValueError, match=r"simulated ranks cannot run this module.*depends on values.*Processes can"):
        sharded(params, {"input_ids": tokens(), "labels": tokens()})


def test_a_proof_is_made_once() -> None:
    model, _ = huggingface.functional(module_of("llama"))
    fcp.transform(model, cp=2)
    start = time.perf_counter()
    fcp.transform(model, cp=2)
    assert time.perf_counter() - start < 0.1
