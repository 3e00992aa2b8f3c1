"""Checkpoints of a training: saved on one mesh, loaded on any other, bit for bit.

    fcp.checkpoint.save(folder, sharded, state, extra={"row": 4096}, keep=3)      # folder/step-00000042/
    state, extra = fcp.checkpoint.load(folder, sharded)                          # the newest whole one

Problem. A training that runs for days ends by a crash, a full disk or somebody's decision, and goes on elsewhere, on
another number of devices. What it goes on from must be everything (parameters, moments, steps, the place in the data),
must be whole, and must not be a program: most formats unpickle, and a pickle runs what it likes.

Idea. The parameters and the optimizer's moments are leaves with names, and `Transformed.held` says which rectangles of
each a process has; so each process writes its own, and reads its own of whatever there is (`_state.py`). They
lie in safetensors files, in torch.distributed.checkpoint's own format (`_shards.py`); scalars and what the
caller adds are JSON. Files become a checkpoint all at once or not at all, and are checked before anything of them is
returned (`_folder.py`). The same lines run in the simulator, where one process has whole leaves.

On processes every rank calls `save`, `Saving.wait` and the loads, and what fails on one is raised on all. The ranks
share the folder and the work: of a leaf's copies one is written, in turns, and each rank checks a part of the files.

With `asynchronous`, `save` copies what this rank writes and returns. A thread writes it, and tells the first rank's
thread so by a file, so that no collective is mixed with the training's. The saves that are going on, by folder, are the
one thing that is remembered here.

Random state: fcp's functions draw nothing, so there is none of its own to keep. The state of a generator of yours goes
into `extra` (`save` shows how). Left out: other versions' formats.
"""

from fcp.checkpoint._load import load, load_params, newest, verify
from fcp.checkpoint._save import Saving, save

__all__ = ["Saving", "load", "load_params", "newest", "save", "verify"]
