"""models._checkpoint: experts that files hold one by one, and a rank's part of them read without the rest."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fcp import huggingface, pytree
from fcp._layout import part_of, take
from fcp.sharded import Placement
from fcp.typing import Split
from models import mixtral
from models._checkpoint import ExpertNames
from tests.toys import randomized

NAMES = ExpertNames(4)


def experts() -> dict[str, Tensor]:
    """A layer's experts, one tensor each: expert e's entries start at 1000 e, so that one in another's place shows."""
    found = {}
    for e in range(4):
        for n, (matrix, shape) in enumerate((("gate_proj", (6, 5)), ("up_proj", (6, 5)), ("down_proj", (5, 6)))):
            values = torch.arange(30.0).view(shape) + 100 * n + 1000 * e
            found[f"model.layers.0.mlp.experts.{e}.{matrix}.weight"] = values
    return found


def test_apart_is_the_inverse_of_stacked() -> None:
    """An expert in another's place; gate and up the other way round."""
    stacked = NAMES.stacked("folder", experts())
    assert stacked["model.layers.0.mlp.experts.gate_up_proj"][2, 6, 0] == 2100  # the first row of up
    apart = NAMES.apart(stacked)
    assert apart.keys() == experts().keys()
    assert all(torch.equal(x, apart[name]) for name, x in experts().items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.pop("model.layers.0.mlp.experts.2.up_proj.weight"), "expert 2's up_proj is missing"),
        (
            lambda x: x.update({"model.layers.0.mlp.experts.4.up_proj.weight": torch.zeros(6, 5)}),
            "have expert 4",
        ),
        (lambda x: x.update({"model.layers.0.mlp.experts.1.up_proj.weight": torch.zeros(7, 5)}), "different shapes"),
        (lambda x: x.update({"model.layers.0.mlp.experts.1.up_proj.weight": torch.zeros(6, 5).bfloat16()}), "dtypes"),
    ],
)
def test_what_does_not_stack_is_refused(change: Any, words: str) -> None:
    """A file that lacks an expert, whose place the next one takes."""
    tensors = experts()
    change(tensors)
    with pytest.raises(ValueError, match=words):
        NAMES.stacked("folder", tensors)


@pytest.mark.parametrize("stored", [(), ("cp",), ("fsdp", "cp")])
def test_a_rank_reads_its_part(stored: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's experts cut from the wrong place; a rank that reads every expert to keep some."""
    model = mixtral.tiny(num_local_experts=6, tie_word_embeddings=True)
    params = randomized(model, dtype=torch.float32)
    mixtral.save(tmp_path, model.config, params)
    lazy = mixtral.load(tmp_path, lazy=True)[1]
    whole = params["model"]["layers"][0]["mlp"]["experts"]["gate_up_proj"]
    stack = lazy["model"]["layers"][0]["mlp"]["experts"]["gate_up_proj"]
    sizes = {"fsdp": 2, "cp": 2, "ep": 2}
    placement = Placement(slices=(("ep", Split(0)),), stored=stored)
    read: list[str] = []
    original = huggingface.Stored.__getitem__

    def counted(self: Any, slices: Any) -> Tensor:
        read.append(self.name)
        return original(self, slices)

    monkeypatch.setattr(huggingface.Stored, "__getitem__", counted)
    for ep in range(2):
        for fsdp in range(2):
            for cp in range(2):
                part = part_of(tuple(whole.shape), placement, sizes, {"fsdp": fsdp, "cp": cp, "ep": ep})
                read.clear()
                assert torch.equal(take(stack, part), take(whole, part))
                kept = {name.split(".experts.")[1].split(".")[0] for name in read}
                if stored == ("fsdp", "cp") and (fsdp, cp) == (1, 1):
                    continue  # of three experts the fourth rank keeps none
                assert kept <= {str(e) for e in range(3 * ep, 3 * ep + 3)}
                assert len(kept) == {(): 3, ("cp",): 2 - cp, ("fsdp", "cp"): 1}[stored]
    assert pytree.paths(lazy) == pytree.paths(params)
