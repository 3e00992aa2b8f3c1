"""What checks and manifests cost: saving and loading a training state against torch.distributed.checkpoint alone.

    python benchmarks/checkpoint.py [LAYERS]

The state is a Llama's of width 512 (8 layers: 430 MB with AdamW's moments, float32). What it is compared with has the
same tensors by the same names, with no checksum, no manifest and no rename: torch's default storage, whose metadata is
a pickle, and its safetensors storage. In turns, on the same disk, each file forced to it; what is read lies in the page
cache, for both. Peak memory is that of a process with its state, in a fresh one; then all of it again on two processes
with half of each leaf. With LAYERS 1 it is a test that the script runs.
"""

import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from measure import forget_peak, peak_mb, print_rows, ratios, status_kb
from torch.distributed.device_mesh import init_device_mesh

import fcp
from fcp import pytree
from models import llama

LAYERS, RUNS = 8, 5
KINDS = ("default", "safetensors")


def model_of(layers: int) -> fcp.Model:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    sizes = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536}
    return llama.model(llama.Config(num_hidden_layers=layers, **sizes, **heads))


def state_of(sharded: fcp.Transformed, params: Any) -> fcp.TrainState:
    """A state as AdamW leaves it; no step is taken."""
    shards = sharded.shard(params)
    state = fcp.train_step(sharded, fcp.optimizer(torch.optim.AdamW, lr=1e-3)).init(shards)
    moments = {
        path: {"step": torch.tensor(1.0), "exp_avg": torch.randn_like(x), "exp_avg_sq": torch.rand_like(x)}
        for path, x in zip(pytree.paths(shards), pytree.leaves(shards), strict=True)
    }
    return fcp.TrainState(shards, {"step": torch.tensor(1), "moments": moments}, state.step + 1, state.skipped)


def tensors_of(sharded: fcp.Transformed, state: fcp.TrainState) -> dict[str, Any]:
    """The state's tensors by name, as torch's checkpoints want them: DTensors where processes have pieces."""
    spec, paths = pytree.flatten(state.params)[1], pytree.paths(state.params)
    trees = {"params": state.params}
    for kind in ("exp_avg", "exp_avg_sq"):
        leaves = [state.optimizer["moments"][path][kind] for path in paths]
        trees[f"moments.{kind}"] = pytree.unflatten(spec, leaves)
    if sharded.mesh is not None:
        trees = {name: sharded.to_dtensor(tree) for name, tree in trees.items()}
    return {
        f"{name}.{path}": x for name, tree in trees.items() for path, x in zip(paths, pytree.leaves(tree), strict=True)
    }


def torch_save(kind: str, folder: Path, tensors: dict[str, Any]) -> None:
    writer: Any = dcp.FileSystemWriter(folder)
    if kind == "safetensors":
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    dcp.save(tensors, storage_writer=writer)


def torch_load(kind: str, folder: Path, tensors: dict[str, Any]) -> None:
    reader: Any = dcp.FileSystemReader(folder)
    if kind == "safetensors":
        reader = dcp.HuggingFaceStorageReader(str(folder))
    dcp.load({name: torch.empty_like(x) for name, x in tensors.items()}, storage_reader=reader)


def cleared(folder: Path, save: Callable[[], object]) -> Callable[[], object]:
    """A save into a folder that is empty each time; removing what was there is timed on both sides."""

    def run() -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        if dist.is_initialized():
            dist.barrier()
        save()

    return run


def actions(folder: Path, sharded: fcp.Transformed, state: fcp.TrainState) -> dict[str, Callable[[], object]]:
    tensors = tensors_of(sharded, state)
    found: dict[str, Callable[[], object]] = {}
    for kind in KINDS:
        found[f"save {kind}"] = cleared(folder / kind, lambda kind=kind: torch_save(kind, folder / kind, tensors))
        found[f"load {kind}"] = lambda kind=kind: torch_load(kind, folder / kind, tensors)
    found["save fcp"] = cleared(folder / "fcp", lambda: fcp.checkpoint.save(folder / "fcp", sharded, state))
    found["load fcp"] = lambda: fcp.checkpoint.load(folder / "fcp", sharded, state)
    return found


def in_turns(folder: Path, sharded: fcp.Transformed, state: fcp.TrainState, runs: int) -> dict[str, float]:
    do = actions(folder, sharded, state)
    for kind in (*KINDS, "fcp"):
        do[f"save {kind}"]()
    found = {}
    for what in ("save", "load"):
        others = {kind: do[f"{what} {kind}"] for kind in KINDS}
        for kind, ratio in ratios(do[f"{what} fcp"], others, runs=runs).items():
            found[f"{what}, to torch's {kind}"] = 1 / ratio
    start = time.perf_counter()
    saving = fcp.checkpoint.save(folder / "beside", sharded, state, asynchronous=True)
    found["seconds until an asynchronous save returns"] = time.perf_counter() - start
    saving.wait()
    found["seconds until it is done"] = time.perf_counter() - start
    return found


def on_two(layers: int, runs: int, folder: str) -> tuple[dict[str, float], dict[str, float]]:
    """On each of two processes: ratios in turns; and the peak of each action, to what the state takes."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sharded = fcp.transform(model_of(layers), fsdp=2, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    state = state_of(sharded, model_of(layers).init(seed=0))
    held = sum(x.numel() * x.element_size() for x in pytree.leaves(state)) / 1024
    peaks = {}
    for name, do in actions(Path(folder) / "peak", sharded, state).items():
        do()
        before = status_kb("VmRSS")
        forget_peak()
        do()
        peaks[name] = (status_kb("VmHWM") - before + held) / held
    return in_turns(Path(folder), sharded, state, runs), peaks


def peak(action: str, layers: int) -> None:
    """Prints how many MB a process with a state has at its highest, above one without."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    sharded = fcp.transform(model_of(layers))
    before = status_kb("VmRSS")
    state = state_of(sharded, sharded.model_fn.init(seed=0))
    with tempfile.TemporaryDirectory(dir=".") as folder:
        do = actions(Path(folder), sharded, state)
        do[f"save {action.split()[1]}"]()
        forget_peak()
        do[action]()
        print((status_kb("VmHWM") - before) / 1024)


def main(layers: int) -> int:
    warnings.simplefilter("ignore")  # torch's checkpoints warn that there is one process
    torch.set_num_threads(2)
    runs = RUNS if layers > 1 else 1
    sharded = fcp.transform(model_of(layers))
    state = state_of(sharded, sharded.model_fn.init(seed=0))
    size = sum(x.numel() * x.element_size() for x in pytree.leaves(state)) / 2**20
    with tempfile.TemporaryDirectory(dir=".") as folder:
        alone = in_turns(Path(folder), sharded, state, runs)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        ranks = fcp.launch(on_two, layers, runs, str(Path(folder).absolute()), num_processes=2)
    del state
    limits = {f"{what}, to torch's {kind}": 1.1 for what in ("save", "load") for kind in KINDS}
    good = print_rows(f"a state of {size:.0f} MB, one process", [(n, x, limits.get(n)) for n, x in alone.items()])
    slowest = {name: statistics.mean(each[0][name] for each in ranks) for name in alone}
    good &= print_rows("two processes, fsdp=2", [(name, x, limits.get(name)) for name, x in slowest.items()])
    rows: list[tuple[str, float | None, float | None]] = []
    for what in ("save", "load"):
        measured = {kind: peak_mb(__file__, f"{what} {kind}", str(layers), runs=1) for kind in (*KINDS, "fcp")}
        rows += [(f"{what}, to torch's {kind}", measured["fcp"] / measured[kind], 1.1) for kind in KINDS]
    good &= print_rows("peak memory of a process with its state", rows)
    highest = {name: max(each[1][name] for each in ranks) for name in ranks[0][1]}
    print_rows("on two processes, to what the state of one takes", [(name, x, None) for name, x in highest.items()])
    return 0 if good else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peak"]:
        peak(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else LAYERS))
