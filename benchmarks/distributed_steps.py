"""The candidates of `distributed.py`: the same training step by fcp, by transformers alone, and by other libraries.

All compute the loss of one batch and the gradient of every parameter, from the same checkpoint, summed over the ranks
as the library would leave them before an optimizer step. A step is written as that library's users write it: for the
peers that is transformers' Llama with the library's attention or sharding plan, and plain `backward`. A Ulysses library
leaves the sum of the parameter gradients to its user; here that is one all-reduce of all of them together.

`make(name)` gives the maker of a step, or None where the library is not installed; none is imported otherwise.
"""

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

import fcp
from fcp import pytree
from models import llama

__all__ = ["NAMES", "find"]

Step = Callable[[], tuple[Tensor, Any]]
"""() -> (this rank's part of the loss, the gradients as this rank holds them)."""
Make = Callable[[str, int, int, int], tuple[Step, Callable[[Any], Iterable[Tensor]]]]
"""(the checkpoint's folder, rows of the batch, tokens a row, documents a row) -> the step; what puts its gradients
together."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v [batch, seq_local, heads, dim] -> [batch, seq_local, heads, dim]."""
Local = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The same of whole sequences and some of the heads."""


def _tokens(rows: int, seq: int) -> Tensor:
    return torch.randint(0, 2048, (rows, seq), generator=torch.Generator().manual_seed(0))


def _batch(rows: int, seq: int, documents: int) -> dict[str, Tensor]:
    """Rows of equal documents, whose first tokens nobody predicts."""
    ids, positions = _tokens(rows, seq), torch.arange(seq // documents).repeat(rows, documents)
    return {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}


def _dense(positions: Tensor, window: int | None) -> Tensor:
    """bool [rows, 1, seq, seq]: the mask as others build it, around every call of attention."""
    index = torch.arange(positions.shape[1])
    apart = index[:, None] - index[None, :]
    documents = (positions == 0).cumsum(1)
    seen = (apart >= 0) & (documents[:, :, None] == documents[:, None, :])
    return (seen if window is None else seen & (apart < window))[:, None]


def _backward(model: Any, **inputs: Any) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), [x.grad for x in model.parameters()]


def _llama(folder: str, **how: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, use_cache=False, **how).train()


def _window(model: Any) -> int | None:
    return getattr(model.config, "sliding_window", None)


def unsharded() -> Make:
    def make(folder: str, rows: int, seq: int, documents: int) -> Any:
        model, batch = _llama(folder, attn_implementation="sdpa"), _batch(rows, seq, documents)
        if documents > 1 or _window(model) is not None:
            batch["attention_mask"] = _dense(batch["position_ids"], _window(model))
        return lambda: _backward(model, **batch), list

    return make


# --- fcp --------------------------------------------------------------------------------------------------------------


def with_fcp(axis: str, **how: Any) -> Make:
    def make(folder: str, rows: int, seq: int, documents: int) -> Any:
        model, params = llama.load(folder)
        batch, size = _batch(rows, seq, documents), dist.get_world_size()
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=(axis,))
        axes: dict[str, Any] = {axis: size}
        sharded = fcp.transform(model, mesh=mesh, logits=False, **axes, **how)
        shards = sharded.shard(params)
        del params
        grad = fcp.value_and_grad(lambda s, b: sharded.on_shards(s, b).loss)

        def step() -> tuple[Tensor, Any]:
            loss, grads = grad(shards, batch)
            return loss / size, grads

        return step, lambda grads: pytree.leaves(sharded.unshard(grads))

    return make


# --- peers ------------------------------------------------------------------------------------------------------------


def deepspeed() -> Make:
    import deepspeed.comm
    from deepspeed.sequence.layer import DistributedAttention

    def attend(local: Local) -> Attend:
        deepspeed.comm.init_distributed("gloo", verbose=False)
        attention = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)
        return lambda q, k, v: attention(q, k, v, 0)

    return _ulysses(attend)


def yunchang() -> Make:
    from yunchang import UlyssesAttention
    from yunchang.kernels import AttnType

    def attend(local: Local) -> Attend:
        attention = UlyssesAttention(dist.group.WORLD, attn_type=AttnType.TORCH_MATH)
        attention.attn_fn = lambda q, k, v, **_: local(q, k, v)  # its own kernels are CUDA's
        return lambda q, k, v: attention(q, k, v, causal=True)

    return _ulysses(attend)


def _local(dense: Tensor | None) -> Local:
    """The kernel that transformers' sdpa runs, on [batch, seq, heads, dim]: plain causal, or with a dense mask."""

    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        found = scaled_dot_product_attention(q, k, v, attn_mask=dense, is_causal=dense is None, enable_gqa=True)
        return found.transpose(1, 2)

    return local


def _ulysses(attend: Callable[[Local], Attend]) -> Make:
    def make(folder: str, rows: int, seq: int, documents: int) -> Any:
        batch = _batch(rows, seq, documents)
        window = AutoConfig.from_pretrained(folder).to_dict().get("sliding_window")
        masked = documents > 1 or window is not None
        attention = attend(_local(_dense(batch["position_ids"], window) if masked else None))

        def forward(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
            return attention(*(x.transpose(1, 2) for x in (q, k, v))).contiguous(), None

        AttentionInterface.register("ulysses", forward)
        model, labels = _llama(folder, attn_implementation="ulysses"), batch["labels"]
        targets = torch.cat([labels[:, 1:], labels.new_full((rows, 1), -100)], 1)
        rank, size = dist.get_rank(), dist.get_world_size()

        def mine(x: Tensor) -> Tensor:
            return x.chunk(size, 1)[rank].contiguous()

        local = {
            "input_ids": mine(batch["input_ids"]),
            "position_ids": mine(batch["position_ids"]),
            "labels": mine(labels),
            "shift_labels": mine(targets),
            "num_items_in_batch": int((targets != -100).sum()),
        }

        def step() -> tuple[Tensor, list[Tensor]]:
            loss, gradients = _backward(model, **local)
            flat = torch.cat([x.flatten() for x in gradients])
            dist.all_reduce(flat)
            parts = flat.split([x.numel() for x in gradients])
            return loss, [part.view_as(x) for part, x in zip(parts, gradients, strict=True)]

        return step, list

    return make


def transformers_tp() -> Make:
    from transformers.distributed import DistributedConfig

    def make(folder: str, rows: int, seq: int, documents: int) -> Any:
        size = dist.get_world_size()
        model = _llama(folder, distributed_config=DistributedConfig(tp_size=size, tp_plan="auto"))
        ids = _tokens(rows, seq)

        def step() -> tuple[Tensor, list[Tensor]]:
            loss, gradients = _backward(model, input_ids=ids, labels=ids)
            return loss / size, gradients

        return step, _full

    return make


def transformers_fsdp() -> Make:
    from transformers.distributed import DistributedConfig

    def make(folder: str, rows: int, seq: int, documents: int) -> Any:
        rank, size = dist.get_rank(), dist.get_world_size()
        model = _llama(folder, distributed_config=DistributedConfig(fsdp_size=size))
        ids = _tokens(rows, seq).chunk(size)[rank]

        def step() -> tuple[Tensor, list[Tensor]]:
            loss, gradients = _backward(model, input_ids=ids, labels=ids)  # gradients: the ranks' mean
            return loss / size, gradients

        return step, _full

    return make


def _full(gradients: list[Any]) -> list[Tensor]:
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in gradients]


NAMES: dict[str, tuple[str, Callable[[], Make]]] = {
    "unsharded": ("transformers", unsharded),
    "fcp cp 2": ("fcp", lambda: with_fcp("cp")),
    "fcp cp 2, ring": ("fcp", lambda: with_fcp("cp", cp_impl="ring", layout="zigzag")),
    "fcp cp 2, gather": ("fcp", lambda: with_fcp("cp", cp_impl="gather", layout="zigzag")),
    "fcp tp 2": ("fcp", lambda: with_fcp("tp")),
    "fcp fsdp 2": ("fcp", lambda: with_fcp("fsdp")),
    "DeepSpeed Ulysses": ("deepspeed", deepspeed),
    "yunchang Ulysses": ("yunchang", yunchang),
    "transformers tp": ("accelerate", transformers_tp),
    "transformers fsdp": ("accelerate", transformers_fsdp),
}
"""Name to (the package that must be there; what gives the maker). transformers shards with accelerate alone."""


def find(name: str) -> Make | None:
    package, maker = NAMES[name]
    return maker() if importlib.util.find_spec(package) else None
