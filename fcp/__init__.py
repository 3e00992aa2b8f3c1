"""fcp, functional context parallelism: a model is a pure function, and cp, tp, fsdp and dp are transforms of it.

>>> import fcp, torch
>>> from models import llama
>>> model = llama.tiny()
>>> params = model.init(seed=0, dtype=torch.float64)
>>> ids = torch.arange(12).reshape(1, 12)
>>> sharded = fcp.transform(model, cp=2, tp=2)
>>> fcp.compare(model, sharded, params, {"input_ids": ids, "labels": ids}).assert_close()

This file is the only door: what is not listed in `__all__` is private.
"""

from fcp import checkpoint, data, huggingface, kernels, masks
from fcp._attention import attention
from fcp._compare import Report, compare, relative_error
from fcp._context_parallel import register_cp
from fcp._distribute import distribute
from fcp._launch import LaunchError, launch
from fcp._linear import linear
from fcp._optimizer import Optimizer, optimizer
from fcp._prepare import prepare
from fcp._rms_norm import rms_norm
from fcp._simulate import simulate
from fcp._train_step import TrainState, TrainStep, train_step
from fcp._transform import transform
from fcp._transformed import Transformed
from fcp._value_and_grad import value_and_grad
from fcp._watch import RankError
from fcp.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    own_slice,
    pmax,
    ppermute,
    psum,
    psum_scatter,
    pvary,
    shard,
    unshard,
)
from fcp.kernels import Kernel, Spec, register_kernel
from fcp.masks import Mask
from fcp.model import Model
from fcp.ops import LOCAL, Ops
from fcp.remat import rematerialize
from fcp.sharded import Sharded
from fcp.trace import Event, record
from fcp.transforms._experts import experts
from fcp.transforms._gather import gather
from fcp.transforms._ring import ring
from fcp.transforms._shard_batch import shard_batch
from fcp.transforms._shard_params import shard_params
from fcp.transforms._shard_seq import shard_seq
from fcp.transforms._ulysses import ulysses
from fcp.typing import IGNORED, Expert, Inputs, ModelFn, Output, Params, Replicated, Rule, Rules, Shared, Split

__version__ = "0.1.0"

__all__ = [
    "IGNORED",
    "LOCAL",
    "Event",
    "Expert",
    "Inputs",
    "Kernel",
    "LaunchError",
    "Mask",
    "Model",
    "ModelFn",
    "Ops",
    "Optimizer",
    "Output",
    "Params",
    "RankError",
    "Replicated",
    "Report",
    "Rule",
    "Rules",
    "Sharded",
    "Shared",
    "Spec",
    "Split",
    "TrainState",
    "TrainStep",
    "Transformed",
    "all_gather",
    "all_to_all",
    "attention",
    "axis_index",
    "axis_size",
    "checkpoint",
    "compare",
    "data",
    "distribute",
    "experts",
    "gather",
    "huggingface",
    "kernels",
    "launch",
    "linear",
    "masks",
    "optimizer",
    "own_slice",
    "pmax",
    "ppermute",
    "prepare",
    "psum",
    "psum_scatter",
    "pvary",
    "record",
    "register_cp",
    "register_kernel",
    "relative_error",
    "rematerialize",
    "ring",
    "rms_norm",
    "shard",
    "shard_batch",
    "shard_params",
    "shard_seq",
    "simulate",
    "train_step",
    "transform",
    "ulysses",
    "unshard",
    "value_and_grad",
]
