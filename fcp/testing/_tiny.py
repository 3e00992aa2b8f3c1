"""Tiny configurations of transformers' causal language models: what a default configuration is changed in, and why.

A model type's configuration is its class's defaults with three kinds of change, all written down here. `SIZES`: fewer
and smaller of everything, by the names that configurations use. `WINDOWS`: a window or chunk that is longer than a test
sequence would never be seen. `BY_TYPE`: what one model type needs beyond that, each with its reason. Every kind of
layer that the defaults have is kept, once.

The result has gone through JSON, so it is the configuration that a checkpoint reloads.
"""

import copy
import json
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["BY_TYPE", "SIZES", "WINDOWS", "tiny_config", "tiny_module"]

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCAB, LENGTH = 32, 4, 2, 8, 48, 96, 64

_BY_SIZE: Mapping[int, str] = {
    HIDDEN: "hidden_size d_model n_embd emb_dim embedding_size word_embed_proj_dim embedding_dim input_embedding_size "
    "hidden_size_global adapter_in_dim adapter_out_dim adapter_input_size "
    "output_embedding_size lru_width",
    HEADS: "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads "
    "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads "
    "linear_num_key_heads linear_num_value_heads linear_num_heads n_mamba_heads time_step_rank mamba_dt_rank "
    "num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num rotary_dim",
    KV_HEADS: "num_key_value_heads num_kv_heads swa_num_key_value_heads num_query_groups num_experts_per_tok moe_topk "
    "moe_top_k moe_k num_experts_per_token",
    HEAD_DIM: "head_dim swa_head_dim d_head dim_head attention_head_dim kv_channels qk_nope_head_dim qk_rope_head_dim "
    "v_head_dim attention_head_size global_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim "
    "index_head_dim index_n_heads mamba_d_state state_size ssm_state_size mamba_head_dim mamba_d_head mamba_num_heads "
    "mamba_n_heads hidden_size_per_layer_input laurel_rank gated_norm_rank loop_gate_rank",
    WIDTH: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size moe_intermediate_size "
    "shared_expert_intermediate_size expert_ffn_hidden_size shared_experts_intermediate_size "
    "moe_shared_expert_intermediate_size intermediate_size_mlp dense_intermediate_size n_inner d_inner dff dim_ff "
    "feed_forward_size shared_intermediate_size",
    VOCAB: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    LENGTH: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions model_max_length "
    "max_source_positions context_length",
    16: "kv_lora_rank q_lora_rank o_lora_rank qk_head_dim mamba_headdim router_hidden_size",
    1: "n_group topk_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts "
    "num_nextn_predict_layers first_k_dense_replace num_dense_layers moe_layer_start_index mamba_n_groups n_groups",
}

SIZES: Mapping[str, int] = {
    **{name: size for size, names in _BY_SIZE.items() for name in names.split()},
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""By name: fewer and smaller, and special tokens that a small vocabulary has."""

WINDOWS: Mapping[str, int] = dict.fromkeys(
    ("sliding_window", "window_size", "sliding_window_size", "attention_window_size", "local_attention"), 4
) | {"keep_window_size": 4, "attention_chunk_size": 4}
"""Shorter than a test sequence, or nobody would see them."""

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
LAYERS += ("encoder_layers", "num_encoder_layers", "num_blocks")

PATTERNS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types", "indexer_types")

HEAD_DIM_IS_NONE = "the class computes head_dim only where the configuration does not have it as None"
FITS = "the class checks that these sizes fit together"
BOTH_KINDS = "one layer of each kind, which no list in the defaults says"

BY_TYPE: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "bamba": ({"attn_layer_indices": [1], "mamba_d_head": 8, "mamba_expand": 2}, BOTH_KINDS),
    "cohere_compass_text": (
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
                for kind in ("full_attention", "sliding_attention")
            },
        },
        BOTH_KINDS + "; positions are set for each",
    ),
    "dbrx": ({"attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 10000.0, "clip_qkv": 8.0}}, "it needs rope_theta"),
    "deepseek_v2": ({"num_experts_per_tok": 2}, "the defaults leave it None"),
    "dots1": ({"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1}, "the defaults leave them None"),
    "dory": (
        {
            "num_hidden_layers": 4,
            "n_input_layers": 1,
            "n_output_layers": 1,
            "n_recurrent_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
        FITS,
    ),
    "dots3_note_text": ({"num_key_value_heads": HEADS}, FITS),
    "falcon_h1": ({"mamba_d_ssm": 64}, FITS),
    "gemma3": ({"image_token_index": VOCAB - 1}, "an image token that the vocabulary has, as the defaults' has"),
    "gemma3n_text": (
        {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        "the last layers reuse the keys of earlier ones, of which there has to be one of each kind",
    ),
    "gpt_neo": ({"attention_types": [[["global", "local"], 1]]}, BOTH_KINDS),
    "granitemoehybrid": ({"layer_types": ["linear_attention", "full_attention"]}, BOTH_KINDS),
    "hrm_text": ({"num_hidden_layers": 1, "num_layers_per_stack": None}, "the stacks are derived from the layers"),
    "hunyuan_v1_dense": ({"head_dim": HEAD_DIM}, HEAD_DIM_IS_NONE),
    "hunyuan_v1_moe": ({"head_dim": HEAD_DIM}, HEAD_DIM_IS_NONE),
    "jamba": ({"attn_layer_period": 2, "attn_layer_offset": 1}, BOTH_KINDS),
    "lfm2_moe": ({"layer_types": ["conv", "full_attention"]}, BOTH_KINDS),
    "mamba2": ({"num_heads": 8, "expand": 2}, FITS),
    "ministral": ({"head_dim": HEAD_DIM}, HEAD_DIM_IS_NONE),
    "nemotron": ({"head_dim": HEAD_DIM, "num_key_value_heads": KV_HEADS}, HEAD_DIM_IS_NONE),
    "qwen4_exp_text": (
        {
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": HEAD_DIM,
            "indexer_budget": 8,
            "indexer_compress_ratio": 2,
        },
        "the defaults set no indexer",
    ),
    "reformer": (
        {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [8, 24], "lsh_attn_chunk_length": 4}
        | {"local_attn_chunk_length": 4, "is_decoder": True},
        FITS,
    ),
    "zamba": (
        {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
        "the second kind shares its weights, which takes two of it",
    ),
    "xmod": ({"default_language": "en_XX"}, "an adapter has to be named"),
    "zaya": ({"num_experts_per_tok": 1}, FITS),
}
"""What a model type needs beyond its sizes, and why."""


DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0}},
}
"""What a class needs to be made at all, where its defaults do not pass its own checks."""


def tiny_config(model_type: str) -> Any:
    """The tiny configuration of one model type of transformers, as a checkpoint would reload it."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    more, _ = BY_TYPE.get(model_type, ({}, ""))
    made = kind(**{**_changes(kind(**DEFAULTS.get(model_type, {}))), **more})
    return kind.from_dict(json.loads(json.dumps(made.to_dict(), default=str)))


def tiny_module(config: Any, seed: int = 0, attention: str = "eager") -> Any:
    """A causal language model in float64, in evaluation mode, every parameter of it random.

    One that is zero or one as it is made (a convolution, a gate, a bias) hides what happens to it.

    Args:
        config: a configuration of transformers; a copy is used.
        seed: of the parameters.
        attention: the implementation that it attends by, "eager" or "sdpa".
    """
    import transformers

    config = copy.deepcopy(config)
    config._experts_implementation = "eager"
    made: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, x in made.named_parameters():
            noise = 0.2 * torch.randn(x.shape, generator=generator, dtype=x.dtype)
            x.copy_(noise + (1.0 if x.dim() < 2 and "norm" in name else 0.0))
    return made


def _changes(default: Any) -> dict[str, Any]:
    """What of a default configuration is changed, by the names it has."""
    held = vars(default)
    changed: dict[str, Any] = {
        name: value
        for table in (SIZES, WINDOWS)
        for name, value in table.items()
        if type(held.get(name)) is int and held[name]  # zero is none of them, and stays so
    }
    if held.get("kv_lora_rank") and "num_key_value_heads" in changed:
        changed["num_key_value_heads"] = HEADS  # keys of latent attention are as many as its queries
    patterns = {name: held[name] for name in PATTERNS if isinstance(held.get(name), list) and held[name]}
    if held.get("is_decoder") is False:
        changed["is_decoder"] = True  # an encoder's class decodes only if told so
    layers = 2
    if patterns:
        kept = list(dict.fromkeys(zip(*patterns.values(), strict=False)))
        kept += kept[: max(0, 2 - len(kept))]
        changed |= {name: [row[i] for row in kept] for i, name in enumerate(patterns)}
        layers = len(kept)
    changed |= {name: layers for name in LAYERS if type(held.get(name)) is int}
    for name, value in held.items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            more, _ = BY_TYPE.get(value.model_type, ({}, ""))
            changed[name] = {**_changes(value), **more, "model_type": value.model_type}
    return changed
