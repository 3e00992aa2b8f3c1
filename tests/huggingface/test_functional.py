"""functional: a module of transformers as a function, what it refuses, checkpoints, and attention written out."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fcp
from fcp import huggingface, pytree
from fcp.huggingface._written_out import Triangle, read_triangles
from fcp.testing import wide
from tests.huggingface.modules import mixin_of, module_of, passes, tokens
from tests.tolerances import FLOAT64

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]


def named(params: Any) -> dict[str, torch.Tensor]:
    return dict(zip(pytree.paths(params), pytree.leaves(params), strict=True))


def test_the_module_is_not_changed() -> None:
    """A forward, a config or a parameter of the caller's that is another one afterwards."""
    module = module_of("gpt_neo")
    before, config = copy.deepcopy(module.state_dict()), module.config.to_dict()
    expected = module(input_ids=tokens(), use_cache=False).logits
    model, params = huggingface.functional(module)
    fcp.value_and_grad(fcp.transform(model, cp=2))(params, {"input_ids": tokens(), "labels": tokens()})
    assert module.config.to_dict() == config
    assert all(torch.equal(before[name], x) for name, x in module.state_dict().items())
    assert torch.equal(expected, module(input_ids=tokens(), use_cache=False).logits)
    assert all(x.grad is None for x in module.parameters())


def test_tied_weights_are_one_leaf() -> None:
    """A tied pair that comes apart: the table gets the gradient of its uses as input and as output."""
    with wide():
        module = module_of("llama", tie_word_embeddings=True)
        model, params = huggingface.functional(module)
        batch = {"input_ids": tokens(), "labels": tokens()}
        module(**batch, use_cache=False).loss.backward()
        for sizes in ({}, {"cp": 2}, {"tp": 2}, {"fsdp": 2}, {"cp": 2, "fsdp": 2, "remat": True}):
            _, grads = fcp.value_and_grad(fcp.transform(model, **sizes))(params, batch)
            assert set(named(grads)) == {name for name, _ in module.named_parameters()}
            table = module.get_input_embeddings().weight
            assert fcp.relative_error(table.grad, grads["model"]["embed_tokens"]["weight"]) < FLOAT64


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"output_router_logits": True}, "output_router_logits"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
    ],
)
def test_what_a_config_may_not_ask(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        huggingface.functional(module_of("qwen3_moe", **change))


def test_no_module_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Linear is no causal language model of transformers"):
        huggingface.functional(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"no folder with a config.json and no GGUF file"):
        huggingface.functional(tmp_path)
    with pytest.raises(ValueError, match="dtype is that of a checkpoint"):
        huggingface.functional(module_of("llama"), dtype=torch.float32)


def test_dropout_in_training_is_refused() -> None:
    module = module_of("gpt2", resid_pdrop=0.5, attn_pdrop=0.0, embd_pdrop=0.0)
    model, _ = huggingface.functional(module)
    fcp.transform(model, cp=2)  # in evaluation it does nothing
    with pytest.raises(ValueError, match=r"in training mode with dropout \(resid_pdrop=0.5\)"):
        huggingface.functional(module.train())


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "gemma3_text", "gpt_oss", "deepseek_v3", "phi3", "bart"])
def test_a_folder_is_written_and_read_bit_for_bit(tmp_path: Path, kind: str) -> None:
    """Names, tied weights, experts and buffers, by transformers and by fcp."""
    module = module_of(kind).float()
    model, params = huggingface.functional(module)
    huggingface.save(tmp_path, model, params)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    expected, actual = module.state_dict(), again.state_dict()
    assert set(expected) == set(actual)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    ours = named(huggingface.functional(tmp_path)[1])
    assert set(ours) == set(named(params))
    assert all(torch.equal(x, ours[name]) and x.dtype == ours[name].dtype for name, x in named(params).items())
    settings = {name: x for name, x in module.config.to_dict().items() if name not in ("architectures", "dtype")}
    assert {name: again.config.to_dict()[name] for name in settings if name != "_name_or_path"} == {
        name: x for name, x in settings.items() if name != "_name_or_path"
    }


def test_an_index_of_several_files_is_read(tmp_path: Path) -> None:
    module = module_of("llama").float()
    module.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    params = named(huggingface.functional(tmp_path)[1])
    assert all(torch.equal(x, params[name]) for name, x in module.named_parameters())
    half = named(huggingface.functional(tmp_path, dtype=torch.bfloat16)[1])
    assert {x.dtype for x in half.values()} == {torch.bfloat16}


def test_foreign_parameters_are_not_written(tmp_path: Path) -> None:
    model, params = huggingface.functional(module_of("llama").float())
    del params["model"]["norm"]
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        huggingface.save(tmp_path, model, params)
    with pytest.raises(ValueError, match=r"not of huggingface.functional"):
        huggingface.save(tmp_path, fcp.Model(None, model.__call__, model.init, None), params)
    assert not list(tmp_path.iterdir())


# --- attention that a module writes out -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rembert", "gpt_neo", "gpt_neox_japanese", "xglm", "falcon"])
def test_attention_written_out_is_followed(kind: str) -> None:
    """Products of four and of three dims, a triangle with a window, a floor at the smallest number, one kv head."""
    passes(
        mixin_of(kind),
        *("test_function_is_module_eager", "test_gradients_are_the_modules", "test_packed_is_each_document_alone"),
        *("test_cp_packed", "test_cp_derivative_on_each_rank", "test_remat"),
    )


def test_a_triangle_is_read_whole() -> None:
    """A slice shorter than the window says nothing about it: the window is taken from the whole buffer."""
    module = module_of("gpt_neo", window_size=40)
    read_triangles(module)
    found = [each.bias.window for each in module.modules() if isinstance(getattr(each, "bias", None), Triangle)]
    assert found == [None, 40] or sorted(found, key=str) == [40, None]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("bloom", "bias"),
        ("mpt", "bias"),
        ("deepseek_v32", "mask itself"),
        ("inkling_text", "position_bias"),
        ("roformer", "one row of position ids"),
        ("gemma4_unified", "depends on more than indices"),
        ("reformer", "draws random numbers"),
    ],
)
def test_what_else_a_module_does_is_refused(kind: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        huggingface.functional(module_of(kind))


# --- on processes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "axes"),
    [("dbrx", ("cp=2",)), ("deepseek_v2", ("cp=2", "tp=2")), ("qwen3_moe", ("fsdp=2", "cp=2"))],
)
def test_a_client_under_torchrun(tmp_path: Path, kind: str, axes: tuple[str, ...]) -> None:
    """Three lines in a script of transformers, on 2 and 4 processes: the module's own loss, logits and gradients.

    DBRX loops over the experts that were chosen, which simulated ranks cannot do together, and processes can.
    """
    module_of(kind).float().save_pretrained(tmp_path)
    count = str(2 ** len(axes))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", count),
            *("tests/huggingface/client.py", str(tmp_path), *axes),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    worst = next(line for line in done.stdout.splitlines() if line.startswith("worst"))
    assert float(worst.split()[1]) < FLOAT64
