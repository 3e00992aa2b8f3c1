"""A script as a user of transformers writes it: load, tokenise, forward; and three lines of fcp. Run under torchrun.

    torchrun --nproc-per-node 2 tests/huggingface/client.py FOLDER cp=2

It prints, on rank 0, the largest relative error of the logits and of every gradient against the module's own.
"""

import sys

import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh

import fcp
from fcp import pytree
from fcp.testing import wide


def main(folder: str, *axes: str) -> None:
    torch.set_num_threads(1)
    sizes = {name: int(size) for name, size in (each.split("=") for each in axes)}
    module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", experts_implementation="eager")
    module = module.double().eval()
    ids = torch.arange(2 * 22).reshape(2, 22) * 5 % 90 + 3
    batch = {"input_ids": ids, "labels": ids}

    model, params = fcp.huggingface.functional(module)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    sharded = fcp.transform(model, **sizes, mesh=mesh)

    with wide():  # float64 where the module casts to float32, so that the comparison can be held to float64's rounding
        out, grads = fcp.value_and_grad(sharded)(params, batch)
        of_shards, shard_grads = fcp.value_and_grad(sharded.on_shards)(sharded.shard(params), batch)
        gathered = sharded.unshard(shard_grads)
        expected = module(**batch, use_cache=False)
        expected.loss.backward()
    errors = [fcp.relative_error(expected.logits.detach(), out.logits)]
    errors += [fcp.relative_error(expected.loss.detach(), each.loss) for each in (out, of_shards)]
    for tree in (grads, gathered):
        named = dict(zip(pytree.paths(tree), pytree.leaves(tree), strict=True))
        learned = [(name, x.grad) for name, x in module.named_parameters() if x.grad is not None]
        errors += [fcp.relative_error(grad, named[name]) for name, grad in learned]
    if torch.distributed.get_rank() == 0:
        print(f"worst {max(errors):.3e} of {len(errors)}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
