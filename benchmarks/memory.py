"""The loss in tiles against the plain loss: peak memory and time of the loss and its two gradients.

The claim: the logits of all tokens are not needed. Vocabulary 128,000, 8,192 tokens, width 512, float32: the logits are
4.2 GB. The plain loss is what anybody would write, torch's linear and cross entropy; beside it stands fcp's own plain
loss, which keeps one copy fewer. Rematerialisation by name is measured on a Llama of 8 layers at 4,096 tokens.

    python benchmarks/memory.py [--tokens 8192] [--vocab 128000] [--runs 3]
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from measure import peak_mb, print_rows, ratios, report_peak
from torch import Tensor
from torch.nn.functional import cross_entropy

import fcp
from models import llama

WIDTH = 512
LAYERS: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 8192,
}
POLICIES = ("nothing", "attention", "layer")


def torchs(hidden: Tensor, table: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(torch.nn.functional.linear(hidden, table).flatten(0, 1), targets.flatten(), reduction="sum")


def plain(hidden: Tensor, table: Tensor, targets: Tensor) -> Tensor:
    return fcp.ops.LOCAL.loss(hidden, table, targets)[0]


def tiled(hidden: Tensor, table: Tensor, targets: Tensor) -> Tensor:
    return fcp.ops.LOCAL.loss(hidden, table, targets, logits=False)[0]


LOSSES = {"torch": torchs, "plain": plain, "tiled": tiled}


def loss_step(name: str, tokens: int, vocab: int) -> Callable[[], tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, tokens, WIDTH, generator=generator)
    table = torch.randn(vocab, WIDTH, generator=generator).mul_(WIDTH**-0.5)
    targets = torch.randint(0, vocab, (1, tokens), generator=generator)

    def step() -> tuple[Tensor, ...]:
        leaves = hidden.detach().requires_grad_(), table.detach().requires_grad_()
        return torch.autograd.grad(LOSSES[name](*leaves, targets), leaves)

    return step


def layers_step(policy: str) -> Callable[[], Any]:
    model = llama.model(llama.Config(**LAYERS))
    params, ids = model.init(seed=0), torch.randint(0, 2048, (1, 4096), generator=torch.Generator().manual_seed(0))
    grad = fcp.value_and_grad(fcp.transform(model, remat=policy, logits=False))
    return lambda: grad(params, {"input_ids": ids, "labels": ids})


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=128_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peak", nargs="+", help="internal: one peak memory measurement")
    args = parser.parse_args()

    if args.peak:
        name, *sizes = args.peak
        report_peak(loss_step(name, *map(int, sizes)) if sizes else layers_step(name))
        return 0

    sizes = (args.tokens, args.vocab)
    for mine, theirs in zip(loss_step("tiled", 256, 4096)(), loss_step("torch", 256, 4096)(), strict=True):
        assert fcp.relative_error(theirs, mine) < 1e-5
    peaks = {name: peak_mb(__file__, name, *map(str, sizes), runs=1) for name in LOSSES}
    good = print_rows(
        f"peak memory, {args.tokens} tokens, vocabulary {args.vocab} / tiled ({peaks['tiled']:.0f} MB)",
        [(f"{name} ({peaks[name]:.0f} MB)", peaks[name] / peaks["tiled"], None) for name in ("torch", "plain")],
    )
    good &= peaks["torch"] / peaks["tiled"] >= 6
    found = ratios(loss_step("torch", *sizes), {n: loss_step(n, *sizes) for n in ("plain", "tiled")}, runs=args.runs)
    good &= print_rows("time / torch", [("plain", found["plain"], None), ("tiled", found["tiled"], 1.15)])

    steps = {policy: layers_step(policy) for policy in POLICIES}
    found = ratios(steps["nothing"], {name: steps[name] for name in POLICIES[1:]}, runs=args.runs)
    peaks = {name: peak_mb(__file__, name) for name in POLICIES}
    rows = [(f"{name}, time", found[name], None) for name in POLICIES[1:]]
    rows += [(f"{name} ({peaks[name]:.0f} MB), memory", peaks[name] / peaks["nothing"], None) for name in POLICIES]
    good &= print_rows("remat of 8 layers at 4,096 tokens / nothing", rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
