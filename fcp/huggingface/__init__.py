"""The door to Hugging Face: checkpoint files, tokenizers, and transformers' modules as pure functions.

    _checkpoint.py   config.json with safetensors, and GGUF, read and written tensor for tensor
    _functional.py   a causal language model of transformers as an fcp.Model
    _skeleton.py     the private copy of its module whose steps ask Ops
    _interfaces.py   what arrives at transformers' attention and mask interfaces, in fcp's words
    _window.py       the window or chunk that a mask function means
    _proof.py        does each position outside attention stand for itself?

transformers, safetensors and gguf are extras: imported inside, where they are needed.
"""

from fcp.huggingface._checkpoint import Stored, check_tensors, read, tokenizer, write
from fcp.huggingface._functional import functional

__all__ = ["Stored", "check_tensors", "functional", "read", "tokenizer", "write"]
