"""Trains a small Llama on a text, its rows split over a cp group:

    torchrun --nproc-per-node 4 docs/train_cp.py --cp 2

Four processes are then two groups of two. The two ranks of a group get the same rows and split each along the sequence;
the two groups get different rows. Parameters and moments are stored in pieces over all four.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fcp
from models import llama

TEXT = Path(__file__).resolve().parent.parent / "data" / "us-declaration.txt"


def rows_at(step: int, group: int, *, rows: int = 2, seq: int = 96) -> torch.Tensor:
    """The rows [rows, seq] of one group: a function of step and group alone, so that its ranks agree."""
    text = torch.tensor(list(TEXT.read_bytes())).clamp(max=127)
    order = torch.randperm(len(text) // seq, generator=torch.Generator().manual_seed(step))
    mine = order[group * rows : (group + 1) * rows].tolist()
    return torch.stack([text[i * seq : (i + 1) * seq] for i in mine])


def train(cp: int, steps: int = 10) -> list[float]:
    """Trains, and gives the losses; every process calls it."""
    groups = int(os.environ["WORLD_SIZE"]) // cp
    mesh = init_device_mesh("cpu", (groups, cp), mesh_dim_names=("fsdp", "cp"))
    model = llama.tiny(vocab_size=128, max_position_embeddings=96)
    rows = "own" if groups > 1 else "all"
    sharded = fcp.transform(model, cp=cp, fsdp=groups, mesh=mesh, rows=rows)

    adamw = fcp.optimizer(torch.optim.AdamW, lr=3e-3)
    step = fcp.train_step(sharded, adamw, max_norm=1.0)
    state = step.init(sharded.shard(model.init(seed=0)))
    losses = []
    for index in range(steps):
        ids = rows_at(index, mesh.get_local_rank("fsdp"))
        state, metrics = step(state, {"input_ids": ids, "labels": ids})
        losses.append(float(metrics["loss"]))  # that of all rows, the same on every rank
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    losses = train(args.cp, args.steps)
    if dist.get_rank() == 0:
        for index, loss in enumerate(losses):
            print(f"step {index}  loss {loss:.6f}")
    dist.destroy_process_group()
