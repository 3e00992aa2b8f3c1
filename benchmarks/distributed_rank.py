"""One rank of one candidate of `distributed.py`: builds the step, says what it found, and runs it when it is told to.

    python distributed_rank.py NAME FOLDER ROWS SEQ DOCUMENTS   (with torchrun's variables where ranks are several)

It answers in JSON, a line a time, on what was standard output: first the package that is missing, or the loss, the norm
of all gradients and its peak memory; then, for every line that comes in, the seconds of one step. It ends where its
input ends. The ranks start a step together, after a barrier that is not timed.

Peak memory is the high-water mark of resident memory above what it was when everything was imported: parameters,
gradients, activations and the buffers of the collectives.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from distributed_steps import find
from measure import forget_peak, status_kb
from torch import Tensor


def norm_of(gradients: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(x.double().square().sum()) for x in gradients))


def main() -> None:
    name, folder, rows, seq, documents = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer

    def answer(**found: Any) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    make = find(name)
    if make is None:
        answer(missing=True)
        return
    imported = status_kb("VmRSS")
    forget_peak()
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        dist.init_process_group("gloo")
    step, whole = make(folder, rows, seq, documents)
    step()  # what is made once is made here
    loss, gradients = step()
    peak = (status_kb("VmHWM") - imported) / 1024
    loss = loss.clone()
    if several:
        dist.all_reduce(loss)
    answer(loss=float(loss), norm=norm_of(whole(gradients)), peak_mb=peak)
    del gradients
    for _ in sys.stdin:
        if several:
            dist.barrier()
        start = time.perf_counter()
        step()
        answer(seconds=time.perf_counter() - start)
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
