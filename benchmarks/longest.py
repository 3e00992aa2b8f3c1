"""The longest sequence whose gradient fits in 8 GiB: fcp's settings for little memory against the plain model.

Llama, 4 layers, width 256, vocabulary 32,000, float32, one process. The plain model is `loss.backward()`; fcp's has no
logits, its loss and its MLPs in tiles of tokens, and its layers computed again. Each trial is a process of its own, and
is ended as soon as its resident memory, libraries and parameters included, passes the limit. The search doubles until a
length does not fit and then halves the gap.

The sequence is packed with documents of 2,048 tokens, so that a trial takes minutes, not hours: memory does not depend
on it (attention's is linear either way), `--document 0` makes it one document.

    python benchmarks/longest.py [--gib 8] [--document 2048] [--precision 0.05]
"""

import argparse
import os
import subprocess
import sys
import time
from typing import Any

import torch
from measure import GIVE_BLOCKS_BACK, ROOT, status_kb
from simulate import plain

import fcp
from models import llama

SIZES: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 2**21,
}
LITTLE: dict[str, Any] = {"remat": "layer", "logits": False, "mlp_tile": 4096}
STEP = 1024


def trial(name: str, seq: int, document: int) -> None:
    model = llama.model(llama.Config(**SIZES))
    params = model.init(seed=0)
    ids = torch.randint(0, SIZES["vocab_size"], (1, seq), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(seq)[None] % (document or seq)}
    if name == "plain":
        plain(model, params, batch)()
    else:
        fcp.value_and_grad(fcp.transform(model, **LITTLE))(params, batch)
    print(status_kb("VmHWM"))


def fits(name: str, seq: int, args: argparse.Namespace) -> bool:
    """Runs one trial, and ends it when it holds more than the limit."""
    limit = args.gib * 2**20
    command = [sys.executable, __file__, "--trial", name, str(seq), "--document", str(args.document)]
    start = time.perf_counter()
    env = {**os.environ, **GIVE_BLOCKS_BACK, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    while child.poll() is None:
        try:
            held = status_kb("VmHWM", child.pid)
        except (OSError, StopIteration):  # it has just ended
            continue
        if held > limit:
            child.kill()
            child.wait()
            break
        time.sleep(0.02)
    said = child.stdout.read() if child.stdout else ""
    if child.returncode > 0:
        raise RuntimeError(f"the trial {command} failed")
    good = child.returncode == 0 and int(said) <= limit
    memory = f"{int(said) / 2**20:.2f} GiB" if said else f"above {args.gib} GiB"
    print(f"  {name:<8} {seq:>9,} tokens: {memory}, {time.perf_counter() - start:.0f} s", flush=True)
    return good


def longest(name: str, start: int, args: argparse.Namespace) -> int:
    """The longest sequence that fits, to `precision`; 0 where not even one step of tokens does."""
    low, high = 0, start
    while fits(name, high, args):
        low, high = high, 2 * high
    while high - low > max(STEP, args.precision * low):
        middle = (low + high) // 2 // STEP * STEP
        low, high = (middle, high) if fits(name, middle, args) else (low, middle)
    return low


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--document", type=int, default=2048, help="tokens in a document, 0 for one")
    parser.add_argument("--precision", type=float, default=0.05)
    parser.add_argument("--trial", nargs=2, metavar=("NAME", "SEQ"), help="internal: one trial")
    args = parser.parse_args()
    if args.trial:
        trial(args.trial[0], int(args.trial[1]), args.document)
        return 0
    base = longest("plain", 8 * STEP, args)
    mine = longest("fcp", max(STEP, 8 * base), args)
    ratio = mine / max(base, 1)
    print(f"longest in {args.gib} GiB: plain {base:,} tokens, fcp {mine:,}: {ratio:.1f} times (at least 8)")
    return 0 if ratio >= 8 else 1


if __name__ == "__main__":
    sys.exit(main())
