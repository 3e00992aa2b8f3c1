"""What is asked of every transformers model type, and what is known not to be possible, in one place."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fcp
from fcp import huggingface
from fcp.testing import tiny_config, wide

SEQ = 12
DOCUMENTS = (5, 7)
"""The second crosses the shard edge at cp=2."""

NOT_CONSTRUCTIBLE: Mapping[str, str] = {
    "blt": "its patch encoder's sizes do not follow from those of its defaults",
    "dots3_note": "its vision and audio parts check sizes against each other",
    "gemma3n": "its vision part needs the timm library",
    "gemma4_assistant": "its defaults do not pass its own validation",
    "gemma4_unified_assistant": "it takes another model's hidden states in the place of tokens",
    "musicgen": "the class reads the decoder's configuration where the mapping gives the whole one",
    "musicgen_melody": "the class reads the decoder's configuration where the mapping gives the whole one",
    "qwen4_exp": "its defaults set no indexer",
    "reformer": "its axial positions have to multiply to every length",
    "zamba": "its tied names assume the default number of layers",
}


@dataclass(frozen=True)
class Verdict:
    """Of one model type: proven with these errors, or refused with this reason."""

    refused: str = ""
    module: float = 0.0
    documents: float = 0.0
    plain: float = 0.0
    packed: float = 0.0
    fsdp: float = 0.0

    @property
    def worst(self) -> float:
        return max(self.module, self.documents, self.plain, self.packed, self.fsdp)


def module_of(model_type: str, seed: int = 0, attention: str = "eager", **overrides: Any) -> nn.Module:
    """A tiny module in float64, every parameter of it random: one that is zero or one hides what happens to it."""
    import transformers

    config = tiny_config(model_type)
    for name, value in overrides.items():
        setattr(config, name, value)
    config._experts_implementation = "eager"
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, x in made.named_parameters():
            noise = 0.2 * torch.randn(x.shape, generator=generator, dtype=x.dtype)
            x.copy_(noise + (1.0 if x.dim() < 2 and "norm" in name else 0.0))
    return made


def tokens(seed: int = 1) -> Tensor:
    """[2, SEQ], none of them special."""
    return torch.randint(3, 60, (2, SEQ), generator=torch.Generator().manual_seed(seed))


def judge(module: nn.Module) -> Verdict:
    """Everything at once, under `wide`: against the module itself, alone and a document at a time; cp, packed, fsdp."""
    ids = tokens()
    batch = {"input_ids": ids, "labels": ids}
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS]).expand(2, -1)
    packed = {**batch, "position_ids": positions}
    with wide():
        with torch.no_grad():
            whole = module(input_ids=ids, use_cache=False).logits
            apart = [module(input_ids=part, use_cache=False).logits for part in ids.split(DOCUMENTS, 1)]
        try:
            model, params = huggingface.functional(module)
            by_cp = fcp.transform(model, cp=2)
        except ValueError as error:
            return Verdict(refused=str(error))
        return Verdict(
            module=fcp.relative_error(whole, model(params, batch).logits),
            documents=fcp.relative_error(torch.cat(apart, 1), model(params, packed).logits),
            plain=fcp.compare(model, by_cp, params, batch).worst,
            packed=fcp.compare(model, by_cp, params, packed).worst,
            fsdp=fcp.compare(model, fcp.transform(model, fsdp=2), params, batch).worst,
        )
