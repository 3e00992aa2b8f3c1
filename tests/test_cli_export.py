"""fcp export: what transformers loads is what was trained."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fcp
from fcp import pytree
from fcp.cli import main
from models import llama, mixtral
from tests.tolerances import EXACT, PARITY_LOGITS
from tests.toys import batch_of, randomized, tokens

transformers = pytest.importorskip("transformers")


def trained(family: Any, folder: Path) -> tuple[Any, Any]:
    """A model's folder and, beside it, checkpoints of a training that began there; the model and its parameters."""
    model = family.tiny()
    params = randomized(model)
    family.save(folder / "model", model.config, params)
    sharded = fcp.transform(model, cp=2)
    step = fcp.train_step(sharded, fcp.optimizer(torch.optim.AdamW, lr=1e-2))
    state = step.init(sharded.shard(params))
    for seed in range(2):
        state, _ = step(state, batch_of(tokens(2, 12, vocab=model.config.vocab_size, seed=seed)))
        fcp.checkpoint.save(folder / "run" / "checkpoints", sharded, state)
    return model, state.params


@pytest.mark.parametrize(
    ("family", "more"),
    [(llama, ()), (llama, ("--model", "models.llama")), (mixtral, ("--model", "models.mixtral"))],
    ids=["transformers", "llama", "mixtral"],
)
def test_transformers_loads_what_was_trained(family: Any, more: Any, tmp_path: Path, capsys: Any) -> None:
    """The weights that training began from; experts or heads in another order; a folder that lacks its config."""
    model, params = trained(family, tmp_path)
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "run"), str(out), "--checkpoint", str(tmp_path / "model"), *more]) == 0
    assert f"{sum(x.numel() for x in pytree.leaves(params)):,} parameters" in capsys.readouterr().out
    module = transformers.AutoModelForCausalLM.from_pretrained(str(out), dtype=torch.float32).eval()
    ids = tokens(2, 9, vocab=model.config.vocab_size)
    expected = model(params, {"input_ids": ids}).logits
    assert fcp.relative_error(expected, module(ids).logits.double()) < PARITY_LOGITS
    _, again = family.load(out)
    assert pytree.paths(params) == pytree.paths(again)
    pairs = zip(pytree.leaves(params), pytree.leaves(again), strict=True)
    assert max(fcp.relative_error(a, b) for a, b in pairs) == EXACT


def test_another_dtype(tmp_path: Path) -> None:
    """Masters in float32 that are written as such, where a model in bfloat16 was asked for."""
    _, params = trained(llama, tmp_path)
    where = ("--checkpoint", str(tmp_path / "model"), "--model", "models.llama", "--dtype", "bfloat16")
    assert main(["export", str(tmp_path / "run" / "checkpoints" / "step-00000002"), str(tmp_path / "out"), *where]) == 0
    _, again = llama.load(tmp_path / "out")
    for a, b in zip(pytree.leaves(params), pytree.leaves(again), strict=True):
        assert torch.equal(a.bfloat16(), b)


def test_what_cannot_be_exported_is_refused(tmp_path: Path, capsys: Any) -> None:
    """A folder that is overwritten; parameters under the config of another model."""
    trained(llama, tmp_path)
    small = llama.tiny(num_hidden_layers=1)
    llama.save(tmp_path / "small", small.config, small.init(seed=0))
    runs, out, model = (str(tmp_path / name) for name in ("run/checkpoints", "out", "model"))
    refused = {
        "nothing is there": (out, out, "--checkpoint", model, "--model", "models.llama"),
        "is there already": (runs, model, "--checkpoint", model),
        "of another model": (runs, out, "--checkpoint", str(tmp_path / "small"), "--model", "models.llama"),
        "no whole checkpoint there": (model, out, "--checkpoint", model, "--model", "models.llama"),
        "has no load and no save": (runs, out, "--checkpoint", model, "--model", "models._rope"),
    }
    for words, args in refused.items():
        assert main(["export", *args]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_model_that_was_read_from_a_gguf_file_is_written(tmp_path: Path) -> None:
    """A module whose blocks were unpacked, which transformers still takes for packed and does not write."""
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes)
    module = transformers.LlamaForCausalLM(config).eval()
    module.hf_quantizer = object()
    module.config.quantization_config = {"quant_method": "gguf"}
    model, params = fcp.huggingface.functional(module)
    fcp.huggingface.save(tmp_path, model, params)
    _, again = fcp.huggingface.functional(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(pytree.leaves(params), pytree.leaves(again), strict=True))
