"""What experts cost: expert compute, the simulated group, and dispatch between two processes.

    python benchmarks/experts.py

One sparse block (a router and 8 experts, top-2, hidden 512, expert width 1024, 4,096 tokens, float32), forward and
backward, every gradient. Three comparisons, each of things that take turns in one run:

- expert compute alone against transformers' grouped implementation of the same experts, in time and in peak memory;
- the simulated group of 4 against the unsharded block;
- two processes of one thread with half of the tokens each, against the unsharded block in one process of two threads:
  fcp's dispatch, and the two plans of transformers (its own classes, on the same local experts). It needs two cores
  that nothing else uses: where they are shared, one process of two threads loses more than two of one.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import peak_mb, print_rows, ratios, report_peak
from torch import Tensor

import fcp
from fcp import pytree
from models._experts import gated_expert, router_logits, softmax_top_k

EXPERTS, K, TOKENS, HIDDEN, WIDTH = 8, 2, 4096, 512, 1024


def block(params: Any, inputs: fcp.Inputs, ops: fcp.Ops) -> fcp.Output:
    """The loss of one sparse block: what it makes of the tokens, squared, and no more."""

    def layer(p: Any, x: Tensor) -> Tensor:
        _, weights, indices = softmax_top_k(router_logits(x, p["gate"]), K, normalize=True)
        return ops.experts(x, weights, indices, p["experts"], gated_expert)

    return fcp.Output(ops.layer(layer, params, inputs.embeds).square().sum() / TOKENS, None)


RULES = {"gate": fcp.Replicated(), "experts.*": fcp.Expert(EXPERTS)}
MODEL = fcp.Model(None, block, lambda seed=0: draw(), RULES)


def draw() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    experts = {"gate_up_proj": normal(EXPERTS, 2 * WIDTH, HIDDEN), "down_proj": normal(EXPERTS, HIDDEN, WIDTH)}
    return {"gate": normal(EXPERTS, HIDDEN), "experts": experts}


def batch(rows: int) -> fcp.Inputs:
    x = torch.randn(rows, TOKENS // rows, HIDDEN, generator=torch.Generator().manual_seed(1))
    return fcp.prepare({"inputs_embeds": x})


def transformers_experts(params: Any) -> Any:
    """transformers' own experts, by its grouped implementation, holding the experts of `params`."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    num = params["gate_up_proj"].shape[0]
    config = MixtralConfig(hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=num)
    config._experts_implementation = "grouped_mm"
    module = MixtralExperts(config)
    module.load_state_dict(params)
    return module


# --- one process ------------------------------------------------------------------------------------------------------


def compute_steps() -> dict[str, Callable[[], Any]]:
    params, x = draw(), batch(1).embeds
    assert x is not None
    _, weights, indices = softmax_top_k(router_logits(x, params["gate"]), K, normalize=True)
    module = transformers_experts(params["experts"])
    moving = {"x": x, "weights": weights, "experts": params["experts"]}
    ours = fcp.value_and_grad(
        lambda p: fcp.LOCAL.experts(p["x"], p["weights"], indices, p["experts"], gated_expert).square().sum()
    )

    def theirs() -> Any:
        a, w = x[0].detach().requires_grad_(), weights[0].detach().requires_grad_()
        module(a, indices[0], w).square().sum().backward()
        found = (a.grad, w.grad, [p.grad for p in module.parameters()])
        module.zero_grad()
        return found

    return {"ours": lambda: ours(moving), "theirs": theirs}


def group_of_four() -> dict[str, Callable[[], Any]]:
    params, inputs = draw(), batch(4)
    plain = fcp.value_and_grad(MODEL)
    fn = fcp.shard_batch(fcp.experts(MODEL, axis="ep"), axis="ep")
    simulated = fcp.value_and_grad(fcp.simulate(fn, ep=4))
    return {"plain": lambda: plain(params, inputs), "ep=4": lambda: simulated(params, inputs)}


# --- two processes ----------------------------------------------------------------------------------------------------


def rank_steps() -> dict[str, Callable[[], Any]]:
    """The steps of one of two ranks; each gives the loss and the gradients, the router's summed over the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import AllReduceEP, AllToAllEP

    rank, params, inputs = dist.get_rank(), draw(), batch(2)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "one"))
    local = {"gate": params["gate"], "experts": pytree.map(lambda x: x.chunk(2)[rank].contiguous(), params["experts"])}

    def sharded(p: Any) -> Tensor:
        marked = {"gate": fcp.pvary(p["gate"], "ep"), "experts": p["experts"]}
        return fcp.shard_batch(fcp.experts(MODEL, axis="ep"), axis="ep").on_local(marked, inputs, fcp.LOCAL).loss

    dispatch = fcp.value_and_grad(fcp.distribute(sharded, mesh))

    def peer(plan: type, x: Tensor, shared: bool) -> Callable[[], Any]:
        module = transformers_experts(local["experts"])
        module.num_experts, module._is_expert_parallel = EXPERTS // 2, True
        run = plan(module, mesh["ep"], mesh["ep" if shared else "one"])

        def step() -> Any:
            gate = local["gate"].detach().requires_grad_()
            _, weights, indices = softmax_top_k(router_logits(x, gate), K, normalize=True)
            loss = run(x[0], indices[0], weights[0]).square().sum() / TOKENS
            loss.backward()
            assert gate.grad is not None
            total = loss.detach()
            if not shared:
                dist.all_reduce(gate.grad)
                dist.all_reduce(total)
            found = {name: p.grad for name, p in module.named_parameters()}
            module.zero_grad()
            return total, {"gate": gate.grad, "experts": found}

        return step

    embeds = inputs.embeds
    assert embeds is not None
    return {
        "fcp dispatch": lambda: dispatch(local),
        "transformers all_to_all": peer(AllToAllEP, embeds[rank, None], shared=False),
        "transformers all_reduce": peer(AllReduceEP, embeds.flatten(0, 1)[None], shared=True),
    }


def rank(path: str, runs: int = 9) -> None:
    """Rank 0 writes the median ratio of each step to the unsharded one, which it alone runs with two threads."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    steps = rank_steps()
    plain, params, inputs = fcp.value_and_grad(MODEL), draw(), batch(2)
    expected, grads = plain(params, inputs)
    mine = pytree.map(lambda x: x.chunk(2)[dist.get_rank()], grads["experts"])
    for name, step in steps.items():  # what is timed is the same function
        loss, found = step()
        pairs = zip(pytree.leaves({"gate": grads["gate"], "experts": mine}), pytree.leaves(found), strict=True)
        error = max(fcp.relative_error(expected.loss, loss), *(fcp.relative_error(a, b) for a, b in pairs))
        assert error < 1e-4, (name, error)
    times: dict[str, list[float]] = {name: [] for name in ("unsharded", *steps)}
    for _ in range(runs):
        for name in times:
            dist.barrier()
            start = time.perf_counter()
            if name != "unsharded":
                steps[name]()
            elif dist.get_rank() == 0:
                torch.set_num_threads(2)
                plain(params, inputs)
                torch.set_num_threads(1)
            dist.barrier()
            times[name].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        base = times.pop("unsharded")
        found = {n: statistics.median(a / b for a, b in zip(each, base, strict=True)) for n, each in times.items()}
        Path(path).write_text(json.dumps(found))
    dist.destroy_process_group()


def on_two_processes() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ratios.json"
        run = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        subprocess.run([*run, __file__, "--rank", str(path)], check=True)
        return json.loads(path.read_text())


def main() -> int:
    torch.set_num_threads(2)
    compute = compute_steps()
    speed = ratios(compute["theirs"], {"ours": compute["ours"]})["ours"]
    memory = peak_mb(__file__, "ours") / peak_mb(__file__, "theirs")
    four = group_of_four()
    simulated = ratios(four["plain"], {"ep=4": four["ep=4"]})["ep=4"]
    two = on_two_processes()
    rows: list[tuple[str, float | None, float | None]] = [
        ("expert compute / transformers' grouped, time", speed, 1.0),
        ("expert compute / transformers' grouped, peak memory", memory, 1.0),
        ("simulated ep=4 / unsharded", simulated, 1.25),
        ("fcp dispatch on 2 processes / unsharded", two["fcp dispatch"], 1.08),
        ("fcp dispatch / transformers all_to_all", two["fcp dispatch"] / two["transformers all_to_all"], 1.0),
        ("transformers all_to_all on 2 processes / unsharded", two["transformers all_to_all"], None),
        ("transformers all_reduce on 2 processes / unsharded", two["transformers all_reduce"], None),
    ]
    return 0 if print_rows("Experts: 8, top-2, 4,096 tokens, hidden 512", rows) else 1


if __name__ == "__main__":
    if "--rank" in sys.argv:
        rank(sys.argv[-1])
    elif "--peak" in sys.argv:
        torch.set_num_threads(1)
        report_peak(compute_steps()[sys.argv[-1]])
    else:
        sys.exit(main())
