"""The door to Hugging Face: checkpoint files, tokenizers, and transformers' modules as pure functions.

    _checkpoint.py   config.json with safetensors, and GGUF, read and written tensor for tensor
    _functional.py   a causal language model of transformers as an fcp.Model
    _skeleton.py     the private copy of its module whose steps ask Ops
    _interfaces.py   what arrives at transformers' attention and mask interfaces, in fcp's words
    _window.py       the window or chunk that a mask function means
    _written_out.py  attention that a module writes out itself, recognised
    _proof.py        does each position outside attention stand for itself?
    _tp_plan.py      transformers' tensor-parallel plan as rules, enter and leave
    _tp_proof.py     is that plan the module?

transformers, safetensors and gguf are extras: imported inside, where they are needed.
"""

from fcp.huggingface._checkpoint import Stored, check_tensors, read, tokenizer, write
from fcp.huggingface._functional import functional, save

__all__ = ["Stored", "check_tensors", "functional", "read", "save", "tokenizer", "write"]
