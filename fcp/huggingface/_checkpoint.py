"""Checkpoints in Hugging Face's formats: config.json with safetensors (one file or an index), and GGUF.

Read and written tensor for tensor, under the checkpoint's own names; a family's file decides what they mean. Nothing is
unpickled, nothing is fetched: paths are local. safetensors, transformers and gguf are extras, imported where they are
needed and missed by name.

A GGUF file names its tensors otherwise (`blk.0.attn_q` is `model.layers.0.self_attn.q_proj`), holds its sizes as
metadata and its matrices in blocks of a few bits. They are unpacked to float32 by the gguf package. Its "llama"
architecture, which is also Mistral's, keeps the rows of queries and keys in another order: the two rows of a rotary
pair lie side by side, where a checkpoint has the first rows of all pairs before the second ones. What a GGUF file may
hold and is not read here (rope scaling, its `rope_freqs`, experts) is refused: to pass it over would change the model.

Left out: downloads, pickled .bin files, quantised weights that stay packed.
"""

import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fcp._stored import Stored, stored_in

__all__ = ["Stored", "check_tensors", "extra", "is_gguf", "read", "tokenizer", "write"]

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def read(path: str | Path, *, lazy: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config.json values and the tensors by name, of a folder or a GGUF file.

    A folder's tensors keep their dtype; those of a GGUF file are float32. With `lazy`, the tensors stay in their files:
    a `Stored` stands for each, and reads no more of it than the slices that are asked for.

    Raises:
        ValueError: the path is neither, or something in it is missing or cannot be read; file and tensor are named. Or
            `lazy` of a GGUF file, whose packed blocks have no slices.
        ImportError: an extra is not installed (`pip install fcp[hf]`).
    """
    path = Path(path).expanduser()
    if is_gguf(path):
        if lazy:
            raise ValueError(
                f"{path}: the blocks of a GGUF file are unpacked whole, so nothing of it can stay in the file"
            )
        return _read_gguf(path)
    if not path.is_dir():
        raise ValueError(
            f"{path}: no checkpoint there; give a folder with config.json and *.safetensors, or a .gguf file"
        )
    if not (path / "config.json").is_file():
        raise ValueError(f"{path}: no config.json in this folder")
    return _json(path / "config.json"), _read_weights(path, _stored if lazy else _safetensors)


def write(folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes config.json and model.safetensors into `folder`, which is made if it is not there."""
    save_file = extra("safetensors.torch").save_file

    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    dense = {name: x.detach().contiguous() for name, x in tensors.items()}
    dtypes = {str(x.dtype).removeprefix("torch.") for x in dense.values()}
    values = {**config, "dtype": dtypes.pop()} if len(dtypes) == 1 else dict(config)
    save_file(dense, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def check_tensors(
    path: str | Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Any],
    tied: Iterable[str] = (),
) -> None:
    """Raises ValueError naming every tensor that is missing, unknown, not floating or not of the config's shape.

    `tied` names may be in the checkpoint without being in the model: a tied head, stored a second time. One that
    differs from the leaf it is tied to would be lost, so it must be equal.
    """
    wrong = [f"{name} is missing" for name in shapes if name not in tensors]
    wrong += [
        f"{name} has shape {tuple(tensors[name].shape)}, not {tuple(shape)}"
        for name, shape in shapes.items()
        if name in tensors and tuple(tensors[name].shape) != tuple(shape)
    ]
    wrong += [f"{name} has dtype {x.dtype}" for name, x in tensors.items() if x.dtype not in FLOATS]
    wrong += [f"{name} is unknown" for name in tensors if name not in shapes and name not in tied]
    table = tensors.get("model.embed_tokens.weight")
    wrong += [
        f"{name} is tied by the config and differs from model.embed_tokens.weight"
        for name in tied
        if name in tensors and table is not None and not torch.equal(tensors[name][:], table[:])
    ]
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ValueError(f"{path}: {'; '.join(wrong[:8])}{more}")


def tokenizer(path: str | Path) -> Any:
    """The tokenizer of a checkpoint folder or a GGUF file, as transformers reads it.

    Raises:
        ValueError: there is none, or it cannot be read.
        ImportError: transformers is not installed.
    """
    path = Path(path).expanduser()
    if is_gguf(path):
        folder, more = path.parent, {"gguf_file": path.name}
    elif any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        folder, more = path, {}
    else:
        raise ValueError(f"{path}: no tokenizer there; give a folder with tokenizer.json, or a .gguf file")
    transformers = extra("transformers")
    try:
        with _quiet(transformers):
            return transformers.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False, **more
            )
    except Exception as error:  # of every kind: each tokenizer class reads its files in its own way
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"{path}: the tokenizer cannot be read ({reason})") from None


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No log lines and no progress bars of transformers inside; its settings are put back."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def extra(name: str, *, of: str = "hf") -> Any:
    """The module of that name, which the extra `of` brings; ImportError says so where it is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = name.partition(".")[0]
        if error.name != missing:
            raise
        raise ImportError(f"{missing} is not installed; `pip install fcp[{of}]` brings it") from None


# --- a folder ---------------------------------------------------------------------------------------------------------


def _read_weights(folder: Path, read_file: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """One file, or the files of an index. Where both are there the one file counts, as it does for transformers."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return read_file(single)
    if not index.is_file():
        raise ValueError(f"{folder}: model.safetensors not found; weights are read from safetensors only")
    by_name = _json(index).get("weight_map")
    if not isinstance(by_name, dict) or not by_name:
        raise ValueError(f"{index}: no weight_map in it")
    tensors: dict[str, Any] = {}
    for file in sorted(set(by_name.values())):
        if Path(file).name != file or not (folder / file).is_file():
            raise ValueError(f"{folder}: {file} not found, which {index.name} names")
        found = read_file(folder / file)
        expected = {name for name, where in by_name.items() if where == file}
        if expected != set(found):
            names = ", ".join(sorted(expected ^ set(found))[:4])
            raise ValueError(f"{folder / file}: differs from {index.name} in {names}")
        tensors.update(found)
    return tensors


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: holds a JSON {type(values).__name__}, not an object")
    return values


def _safetensors(path: Path) -> dict[str, Tensor]:
    library, load_file = extra("safetensors"), extra("safetensors.torch").load_file
    try:
        return load_file(path)
    except (library.SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not readable as safetensors ({error})") from None


def _stored(path: Path) -> dict[str, Stored]:
    library = extra("safetensors")
    try:
        return stored_in(path)
    except (library.SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not readable as safetensors ({error})") from None


# --- GGUF -------------------------------------------------------------------------------------------------------------

GGUF_SIZES = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
"""Metadata, after the name of the architecture, and the setting of config.json that it is."""

GGUF_TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}

GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def is_gguf(path: Path) -> bool:
    return path.is_file() and path.suffix == ".gguf"


def _read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    gguf = extra("gguf")
    try:
        reader = gguf.GGUFReader(path)
        names = {name: name.removeprefix("tokenizer.ggml.") for name in reader.fields}
        wanted = {name for name, short in names.items() if short == name or short in GGUF_TOKENS}
        metadata = {name: field.contents() for name, field in reader.fields.items() if name in wanted}
        packed = {_gguf_name(tensor.name): tensor for tensor in reader.tensors}
    except (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise ValueError(f"{path}: not readable as GGUF ({error})") from None
    values = _gguf_config(path, metadata, packed)
    tensors = {}
    for name, tensor in packed.items():
        try:
            x = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
        except (NotImplementedError, ValueError) as error:
            raise ValueError(f"{path}: {name} cannot be unpacked ({error})") from None
        if values["model_type"] == "llama" and (".q_proj." in name or ".k_proj." in name):
            x = _halves(x, values["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"])
        tensors[name] = x
    return values, tensors


def _gguf_name(name: str) -> str:
    """The checkpoint's name of a GGUF tensor; the name itself where it has none (and is then an unknown tensor)."""
    module, _, kind = name.rpartition(".")
    layer = ""
    if module.startswith("blk."):
        _, index, module = module.split(".", 2)
        layer = f"model.layers.{index}."
    return f"{layer}{GGUF_NAMES[module]}.{kind}" if module in GGUF_NAMES else name


def _gguf_config(path: Path, metadata: Mapping[str, Any], packed: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in config.json's words."""
    kind = metadata.get("general.architecture")
    if kind not in ("llama", "qwen2", "qwen3"):
        raise ValueError(f"{path}: architecture {kind!r} is not read; llama, qwen2 and qwen3 are")
    own = {name.removeprefix(f"{kind}."): x for name, x in metadata.items() if name.startswith(f"{kind}.")}
    values = {name: own.pop(key) for key, name in GGUF_SIZES.items() if key in own}
    values.update({n: metadata[k] for key, n in GGUF_TOKENS.items() if (k := f"tokenizer.ggml.{key}") in metadata})
    lacking = [key for key, name in GGUF_SIZES.items() if name not in values and "_kv" not in key and "key" not in key]
    lacking = [key for key in lacking if key != "rope.freq_base"]
    if lacking or "model.embed_tokens.weight" not in packed:
        raise ValueError(f"{path}: {', '.join(f'{kind}.{key}' for key in lacking) or 'token_embd.weight'} is missing")
    listed = [name for name, value in values.items() if isinstance(value, list)]
    if listed:
        raise ValueError(f"{path}: {', '.join(listed)} with one value a layer is not computed here")
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
    # What may be said in passing, and then must say what is computed anyway.
    same = {"attention.value_length": values["head_dim"], "rope.dimension_count": values["head_dim"]}
    same |= {"rope.scaling.type": "none", "attention.causal": True, "expert_count": 0, "expert_used_count": 0}
    refused = [
        f"{kind}.{key} {value!r}"
        for key, value in own.items()
        if key.startswith(("attention.", "rope.", "expert")) and same.get(key) != value
    ]
    if refused:
        raise ValueError(f"{path}: {', '.join(refused)} is not computed here")
    return {
        **values,
        "model_type": kind,
        "vocab_size": int(packed["model.embed_tokens.weight"].shape[1]),
        "attention_bias": "model.layers.0.self_attn.o_proj.bias" in packed,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in packed,
        "tie_word_embeddings": "lm_head.weight" not in packed,
    }


def _halves(x: Tensor, heads: int) -> Tensor:
    """Each head's rows from (pair 0, pair 0, pair 1, pair 1, ...) to all first ones, then all second ones."""
    return x.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()
