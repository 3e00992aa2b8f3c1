"""What simulated ranks cost: one step, forward and backward, against plain `loss.backward()` of the same model.

The claim: ranks as vmapped dimensions cost little, because what is the same on every rank is computed once. Llama,
width 256, 4 layers, 8 query and 4 kv heads, vocabulary 2,048, batch 1, 2,048 tokens, float32, unless a row says so.
torch's own LocalTensor (ranks as lists of tensors in one process) runs the same cp work beside it.

    python benchmarks/simulate.py [--runs 9]
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from measure import peak_mb, print_rows, ratios, report_peak

import fcp
from fcp import pytree
from models import llama

SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 8192,
}
WIDE: dict[str, Any] = {
    **SIZES,
    "hidden_size": 1024,
    "intermediate_size": 2736,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
DEEP: dict[str, Any] = {**SIZES, "num_hidden_layers": 16}


def problem(sizes: dict[str, Any], seq: int) -> tuple[fcp.Model, Any, dict[str, torch.Tensor]]:
    model = llama.model(llama.Config(**sizes))
    ids = torch.randint(0, sizes["vocab_size"], (1, seq), generator=torch.Generator().manual_seed(0))
    return model, model.init(seed=0), {"input_ids": ids, "labels": ids}


def plain(model: Any, params: Any, batch: Any) -> Callable[[], Any]:
    """What anybody would write: parameters that require a gradient, `loss.backward()`."""
    params = pytree.map(lambda x: x.clone().requires_grad_(), params)

    def step() -> Any:
        model(params, batch).loss.backward()
        for x in pytree.leaves(params):  # so that gradients count inside the step, as those that fcp returns do
            x.grad = None

    return step


def step_of(model: Any, params: Any, batch: Any, **axes: Any) -> Callable[[], Any]:
    sharded = fcp.transform(model, **axes)
    grad = fcp.value_and_grad(lambda p, b: sharded(p, b).loss)
    return lambda: grad(params, batch)


RECOMPUTED: dict[str, Any] = {"remat": "layer", "logits": False}


def parse_axes(text: str) -> dict[str, Any]:
    if text == "remat":
        return RECOMPUTED
    return {name: int(size) for name, size in (pair.split("=") for pair in text.split(",") if pair)}


def local_tensor(model: fcp.Model, params: Any, batch: Any, ranks: int) -> Callable[[], Any] | None:
    """The same cp step on torch's LocalTensor, held to the plain loss; None where this torch cannot run it."""
    try:
        from local_tensor_step import make_step
    except ImportError:
        return None
    step = make_step(model, params, batch, ranks)
    assert abs(step() - float(model(params, batch).loss)) < 1e-4
    return step


MEMORY = {
    "plain": None,
    "value_and_grad": "",
    "cp 2": "cp=2",
    "cp 8": "cp=8",
    "tp 2": "tp=2",
    "cp 2 x tp 2": "cp=2,tp=2",
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--peak", nargs=2, metavar=("SIZES", "AXES"), help="internal: one peak memory measurement")
    args = parser.parse_args()
    torch.manual_seed(0)

    if args.peak:
        sizes, axes = args.peak
        model, params, batch = problem({"base": SIZES, "deep": DEEP}[sizes], 2048)
        report_peak(
            plain(model, params, batch) if axes == "plain" else step_of(model, params, batch, **parse_axes(axes))
        )
        return 0

    good = True
    base = problem(SIZES, 2048)
    limits = {"cp=2": 1.15, "cp=4": None, "cp=8": 1.15, "tp=2": 1.2, "cp=2,tp=2": 1.3}
    steps = {name: step_of(*base, **parse_axes(name)) for name in limits}
    found = ratios(plain(*base), {"one rank": step_of(*base), **steps}, runs=args.runs)
    rows = [(name, found[name], limits.get(name)) for name in found]
    good &= print_rows("time of a step at 2,048 tokens / plain backward", rows)

    wide = problem(WIDE, 256)
    found = ratios(plain(*wide), {"cp=4": step_of(*wide, cp=4)}, runs=args.runs)
    good &= print_rows("width 1,024, 256 tokens", [("cp=4", found["cp=4"], 1.1)])

    short = problem(SIZES, 128)
    found = ratios(plain(*short), {"cp=8": step_of(*short, cp=8)}, runs=3 * args.runs)
    good &= print_rows("128 tokens", [("cp=8", found["cp=8"], 2.0)])

    for seq in (2048, 128):
        ranks = problem(SIZES, seq)
        peer = local_tensor(*ranks, 8)
        found = {} if peer is None else ratios(plain(*ranks), {"peer": peer, "fcp": step_of(*ranks, cp=8)}, runs=3)
        rows = [("fcp", found.get("fcp"), None), ("torch's LocalTensor", found.get("peer"), None)]
        good &= print_rows(f"8 ranks at {seq} tokens, the same work", rows)

    peaks = {name: peak_mb(__file__, "base", "plain" if axes is None else axes) for name, axes in MEMORY.items()}
    rows = [
        (f"{name} ({peak:.0f} MB)", peak / peaks["plain"], {"plain": None, "value_and_grad": 1.05}.get(name, 1.25))
        for name, peak in peaks.items()
    ]
    good &= print_rows("peak memory of a step at 2,048 tokens / plain backward", rows)

    deep = problem(DEEP, 2048)
    kept = step_of(*deep)
    found = ratios(kept, {"remat": step_of(*deep, **RECOMPUTED)}, runs=max(3, args.runs // 3))
    high, low = peak_mb(__file__, "deep", ""), peak_mb(__file__, "deep", "remat")
    rows = [
        ("time, remat / kept", found["remat"], 1.4),
        (f"memory, kept {high:.0f} MB / remat {low:.0f} MB", high / low, None),
    ]
    good &= print_rows("rematerialisation, 16 layers (memory at least 2.5 times lower)", rows)
    good &= high / low >= 2.5
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
