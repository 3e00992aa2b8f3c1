"""Between config.json and the fields of `models.llama.Config`, in both directions.

A config.json says more than a family's file computes, and what is not computed must not be passed over: a checkpoint
that was trained with another activation, a soft cap or half-rotated heads would load, run, and be wrong. So a setting
is read, or it is known to change nothing, or it is refused by name. Unknown keys are refused where their name says that
they reach the computation (`SUSPECT`) and their value is not neutral; the many others (`bos_token_id`, `auto_map`,
`transformers_version`) are left alone.

Old and new files are read alike. Up to version 4, transformers wrote `rope_theta` beside `rope_scaling` (with "type"),
and left out `head_dim` or `num_key_value_heads`; from 5 on `rope_parameters` holds them together. Values that a file
leaves out are those of transformers' own configuration class.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from models._rope import check_rope, rope_type

__all__ = ["FAMILIES", "fields_from_json", "fields_to_json", "own_fields", "rope_fields", "rope_to_json"]

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
"""What a config.json must say; everything else has a default."""

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
}
"""Where transformers' configuration classes differ from Config's own defaults."""

BIASES = {"attention_bias": ("llama", "qwen2", "qwen3"), "mlp_bias": ("llama",)}
"""The families that know these settings (qwen2's attention has its biases either way)."""

SUSPECT = ("alibi", "bidirectional", "causal", "chunk", "clip_qkv", "cross_attention", "dropout", "encoder_decoder")
SUSPECT += ("expert", "moe", "mrope", "multiplier", "no_rope", "partial_rotary", "pretraining_tp", "qk_layernorm")
SUSPECT += ("qk_norm", "quantization", "rope_", "scale", "scaling", "softcap")
"""Parts of names of settings that change what a model computes."""

FACTORS = ("multiplier", "partial_rotary", "pretraining_tp", "scale", "scaling")
"""Those that change nothing at 1, where the others change nothing at 0, False or empty."""

ELSEWHERE = ("classifier_dropout", "original_max_position_embeddings", "rope_parameters", "rope_scaling", "rope_theta")
"""Read elsewhere, or of a head that is not here."""


def fields_from_json(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The fields `names` of a Config, from the values of a config.json.

    Raises:
        ValueError: another model type, a size that is missing, or a setting that is not computed; all of them named.
    """
    kind = values.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"model_type {kind!r} is none of {', '.join(FAMILIES)}")
    values = {**DEFAULTS[kind], **values}
    missing = [name for name in SIZES if values.get(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")
    refused = _refused(values)
    if refused:
        raise ValueError(f"{'; '.join(refused)}: not computed here")
    found = {name: values[name] for name in names if values.get(name) is not None}
    heads = values["num_attention_heads"]
    found.setdefault("num_key_value_heads", heads)
    found.setdefault("head_dim", values["hidden_size"] // heads)
    if isinstance(found.get("eos_token_id"), list):  # any one of several ends a text
        found["eos_token_id"] = tuple(found["eos_token_id"])
    return {**found, **rope_fields(values), **_windows(values)}


def _refused(values: Mapping[str, Any]) -> list[str]:
    kind, wrong = values["model_type"], []
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        wrong.append(f"hidden_act {values['hidden_act']!r} (silu is)")
    for name, kinds in BIASES.items():
        if values.get(name) and kind not in kinds:
            wrong.append(f"{name} of {kind}")
    return wrong + _suspicious(values)


def _suspicious(values: Mapping[str, Any], known: Iterable[str] = ()) -> list[str]:
    """The settings, other than those `known`, that reach the computation by their name and are not neutral."""
    return [
        f"{name} {value!r}" if isinstance(value, int | float | str) else name
        for name, value in values.items()
        if name not in (*ELSEWHERE, *known) and any(part in name for part in SUSPECT) and not _neutral(name, value)
    ]


def own_fields(
    values: Mapping[str, Any], model_type: str, names: Iterable[str], computed: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """The fields `names` of a Config whose family has settings of its own, from the values of a config.json.

    Args:
        values: of the file; a value of None is one that it leaves out, but for a token, of which there is then none.
        model_type: the family's.
        names: the Config's fields, whose values are read as they are (lists as tuples).
        computed: settings that are no field, each with the values that are computed.

    Raises:
        ValueError: another model type, a size that is missing, or a setting that is not computed; all of them named.
    """
    if values.get("model_type") != model_type:
        raise ValueError(f"model_type {values.get('model_type')!r} is not {model_type!r}")
    names = list(names)
    missing = [name for name in SIZES if name in names and values.get(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")
    wrong = [
        f"{name} {values[name]!r} (computed: {', '.join(map(repr, known))})"
        for name, known in computed.items()
        if values.get(name) is not None and values[name] not in known
    ]
    wrong += _suspicious(values, (*names, *computed))
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}: not computed here")
    said = [name for name in names if name in values and name not in ELSEWHERE]
    found = {name: values[name] for name in said if values[name] is not None or name.endswith("token_id")}
    return {name: tuple(x) if isinstance(x, list) else x for name, x in found.items()}


def rope_to_json(theta: float, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """The `rope_parameters` of a config.json."""
    scaling = dict(scaling or {})
    kind = rope_type(scaling)
    scaling.pop("type", None)
    return {**scaling, "rope_type": kind, "rope_theta": theta}


def _neutral(name: str, value: Any) -> bool:
    if value is None or name == "is_causal":
        return value is not False
    if any(part in name for part in FACTORS) and value is not False:
        return value == 1
    return not value


def rope_fields(values: Mapping[str, Any], theta: float = 10000.0) -> dict[str, Any]:
    """The fields `rope_theta` (`theta` where the file says none) and `rope_scaling`."""
    rope = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    nested = [name for name, value in rope.items() if isinstance(value, Mapping)]
    if nested:
        raise ValueError(f"rope_parameters with a set for each of {', '.join(nested)}: one for all layers is read")
    theta = rope.pop("rope_theta", None) or values.get("rope_theta") or theta
    kind = rope_type(rope)
    rope.pop("type", None)
    original = values.get("original_max_position_embeddings")
    if kind in ("llama3", "yarn") and original is not None:  # beside the scaling it outranks the one inside
        rope["original_max_position_embeddings"] = original
    check_rope({**rope, "rope_type": kind})
    rope.pop("partial_rotary_factor", None)  # 1, or it was refused
    return {"rope_theta": float(theta), "rope_scaling": None if kind == "default" else {**rope, "rope_type": kind}}


def _windows(values: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers slide: Mistral's all; Qwen's those listed, or from max_window_layers on, if it uses windows."""
    kind, window, layers = values["model_type"], values.get("sliding_window"), values["num_hidden_layers"]
    types = values.get("layer_types")
    slides = types is not None and any(name != "full_attention" for name in types)
    if kind == "llama":
        if window is not None or slides:
            raise ValueError(
                "sliding_window or layer_types that slide, of llama: its layers see everything (mistral's do)"
            )
        return {"sliding_window": None, "layer_types": None}
    if kind == "mistral":
        if types is not None and any(name != "sliding_attention" for name in types) and window is not None:
            raise ValueError("layer_types that do not all slide, of mistral: its layers are all alike")
        return {"sliding_window": window, "layer_types": None if window is None or types is None else tuple(types)}
    if not values.get("use_sliding_window", False):
        window = None
    if window is None and not slides:
        return {"sliding_window": None, "layer_types": None}
    if types is None:
        first = values["max_window_layers"]
        types = ["full_attention" if index < first else "sliding_attention" for index in range(layers)]
    return {"sliding_window": window, "layer_types": tuple(types)}


def fields_to_json(fields: Mapping[str, Any], windows: list[int | None]) -> dict[str, Any]:
    """A config.json that transformers reads as the same model; `windows` is each layer's.

    Raises:
        ValueError: a combination that transformers' class of this family does not compute (a window on llama).
    """
    values, kind = dict(fields), fields["model_type"]
    rope = rope_to_json(values.pop("rope_theta"), values.pop("rope_scaling"))
    types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    values.update(rope_parameters=rope, hidden_act="silu", attention_dropout=0.0)
    values["architectures"] = [f"{FAMILIES[kind]}ForCausalLM"]
    values["sliding_window"] = next((window for window in windows if window is not None), None)
    if kind.startswith("qwen"):
        values["layer_types"] = types
        values["use_sliding_window"] = values["sliding_window"] is not None
        values["max_window_layers"] = types.index("sliding_attention") if values["use_sliding_window"] else len(types)
    else:
        if len(set(types)) > 1:
            raise ValueError(
                f"config.json: transformers' {kind} has no layers of different windows; qwen2 and qwen3 have"
            )
        del values["layer_types"]
    wrong = _refused(values)
    for name, kinds in BIASES.items():
        if kind not in kinds:
            del values[name]
    if kind == "llama" and values.pop("sliding_window") is not None:
        wrong.append("sliding_window of llama (mistral is llama with a window)")
    if wrong:
        raise ValueError(f"config.json: transformers does not compute {'; '.join(wrong)}")
    return values
