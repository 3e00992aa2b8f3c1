"""Run by the `build` session with the installed wheel, away from the checkout: imports, transforms and compares."""

from pathlib import Path
from typing import Any

import torch

import fcp

assert Path(__file__).resolve().parent.parent / "fcp" != Path(fcp.__file__).parent, "the checkout, not the wheel"


def model(params: Any, inputs: fcp.Inputs, ops: fcp.Ops = fcp.LOCAL) -> fcp.Output:
    x = ops.layer(lambda table, tokens: ops.embed(tokens, table), params["table"], inputs.tokens)
    heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
    x = x + ops.attention(heads, heads, heads, inputs.mask).transpose(1, 2).flatten(2)
    total, logits = ops.layer(lambda table, x, targets: ops.loss(x, table, targets), params["table"], x, inputs.targets)
    return fcp.Output(total / inputs.num_targets, logits)


params = {"table": torch.randn(16, 8, dtype=torch.float64)}
ids = torch.arange(10).repeat(2, 1)
report = fcp.compare(model, fcp.transform(model, cp=2, fsdp=2), params, {"input_ids": ids, "labels": ids})
report.assert_close()
print(report)
