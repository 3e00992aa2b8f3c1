"""A layer's input on the host until its backward: device memory that does not grow with the number of layers.

Problem. Where every layer is computed again in backward, what is left on the device is each layer's input, [tokens,
width] a layer; at long sequences that is most of what there is.

Idea. When a layer has run, its input is copied to pinned host memory by a stream of its own, while the next layer
computes; when its backward begins, it is copied back. The device may give the memory away as soon as the copy has
ended (`record_stream`), and what computes waits for the copy alone (`wait_stream`), never the host.

Only differentiation without torch.func goes through here (`fcp.value_and_grad` outside of simulate's map, or
`backward`). Under torch.func.grad every input is also part of the graph of the gradient, so nothing would be freed.

Left out: fetching one layer ahead in backward. And the CPU, whose tensors are on the host already: refused by who asks.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["OnHost", "to_host"]


@dataclass(frozen=True, eq=False)
class OnHost:
    """A tensor of a CUDA device, copied to pinned memory."""

    copy: Tensor
    device: torch.device

    def back(self) -> Tensor:
        """On its device again, for what is computed on the current stream."""
        here, copies = torch.cuda.current_stream(self.device), _stream(self.device)
        with torch.cuda.stream(copies):  # in order after the copy to the host
            found = self.copy.to(self.device, non_blocking=True)
        here.wait_stream(copies)
        found.record_stream(here)
        return found


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def to_host(x: Tensor) -> OnHost:
    """Starts the copy of a CUDA tensor; the host does not wait for it."""
    copies = _stream(x.device)
    copies.wait_stream(torch.cuda.current_stream(x.device))  # x may still be in the making
    with torch.cuda.stream(copies):
        copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        copy.copy_(x, non_blocking=True)
    x.record_stream(copies)
    return OnHost(copy, x.device)
