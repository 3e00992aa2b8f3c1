"""Is a kernel what it says? Asked once, before its first result is relied on.

Problem. A kernel on an accelerator is compiled for the card at hand, by versions of a compiler and a driver that nobody
here has seen. One that is wrong raises nothing: a run simply learns something else.

Idea. On a device other than the CPU, where every kernel is tested, a kernel that is used for the first time in a dtype,
with a window, a chunk or a soft cap or without, is first given a small batch: packed documents, padding, grouped heads.
Its output, its log-sum-exp and its gradients, the latter from a corrected normaliser as sinks and rings make it, are
compared with what the reference makes of the same numbers in float64 on the CPU.

Left out: sizes and masks that only a long sequence has. That is what a test on the device is for.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fcp import pytree
from fcp.kernels import Kernel, Spec, pick, registered, weight_of
from fcp.masks import Mask, describe

__all__ = ["check", "serving"]

TRUSTED = {"cpu", "meta"}
"""Devices whose kernels are not asked."""

BOUNDS = {torch.float64: 1e-9, torch.float32: 5e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Relative to the largest entry. float32 has room for matrix products in TF32, which torch may be told to use."""

LENGTHS = (5, 3, 70, 1, 61)
"""Of the documents in a row: some within a block of keys, some across, the last one not ending with it."""

_checked: set[tuple[object, ...]] = set()


def serving(spec: Spec, q: Tensor, v: Tensor, mask: Mask) -> Kernel:
    """The kernel that serves a call on plain tensors, checked.

    Raises:
        ValueError: the kernel that was asked for refuses the call.
        RuntimeError: it gives something else than the reference.
    """
    name = pick(spec, q, v, mask)
    if q.device.type not in TRUSTED and name != "reference":
        words = spec.window is not None, spec.chunk is not None, spec.softcap is not None
        asked = (name, q.device, q.dtype, words)
        if asked not in _checked:
            check(name, spec, q, v)
            _checked.add(asked)
    return registered[name]


def check(name: str, spec: Spec, q: Tensor, v: Tensor) -> None:
    """Compares kernel `name` with the reference, on the device, in the dtype and with the head sizes of q and v.

    Raises:
        RuntimeError: they differ.
    """
    kernel, reference = registered[name], registered["reference"]
    spec = replace(spec, window=spec.window and 9, chunk=spec.chunk and 17)
    mask = _mask(kernel, spec)
    if mask is None:
        return
    given = _numbers(q.shape[-1], v.shape[-1], q.dtype)
    wanted = _results(reference, mask, spec, [x.double() for x in given])
    found = _results(kernel, pytree.map(lambda x: x.to(q.device), mask), spec, [x.to(q.device) for x in given])
    errors = {part: _error(wanted[part], found[part].to("cpu", torch.float64)) for part in wanted}
    bound = BOUNDS.get(q.dtype, 5e-2)
    if not all(error <= bound for error in errors.values()):  # NaN is none
        told = ", ".join(f"{part} {error:.1e}" for part, error in errors.items())
        raise RuntimeError(
            f"attention: kernel {name!r} on {q.device} in {q.dtype} differs from the reference: {told}, relative to "
            f"the largest entry, where {bound:.0e} is allowed. No result of this run would be right; use "
            f"kernel='reference', or another build of torch."
        )


def _mask(kernel: Kernel, spec: Spec) -> Mask | None:
    """The hardest mask of these that the kernel serves; it may serve none of them."""
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).expand(2, -1)
    valid = torch.ones_like(positions, dtype=torch.bool)
    valid[1, :4] = False  # padding on the left, a query without a key in each of its rows
    plain = torch.arange(positions.shape[1]).expand(2, -1)
    masks = describe(positions, valid=valid), describe(positions), describe(plain)
    return next((mask for mask in masks if kernel.refuses_mask(spec, mask) is None), None)


def _numbers(dim: int, v_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, the output's cotangent, and a sink for each row and head."""
    generator, seq = torch.Generator().manual_seed(0), sum(LENGTHS)
    shapes = (2, 4, seq, dim), (2, 2, seq, dim), (2, 2, seq, v_dim), (2, 4, seq, v_dim), (2, 4)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [*(x.to(dtype) for x in drawn[:4]), drawn[4].to(torch.promote_types(dtype, torch.float32))]


def _results(kernel: Kernel, mask: Mask, spec: Spec, given: list[Tensor]) -> dict[str, Tensor]:
    q, k, v, g, sinks = given
    out, lse = kernel.forward(q, k, v, mask, spec)
    both = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))
    corrected = (out * weight_of(lse, both)).to(out.dtype)
    dq, dk, dv = kernel.backward(g, q, k, v, corrected, both, mask, spec)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def _error(wanted: Tensor, found: Tensor) -> float:
    """The largest difference, relative to the largest entry; of a log-sum-exp, rows without a key must agree."""
    nothing = wanted == -torch.inf
    if wanted.shape != found.shape or not torch.equal(nothing, found == -torch.inf):
        return float("inf")
    wanted, found = wanted[~nothing], found[~nothing]
    return float((wanted - found).abs().max() / wanted.abs().max())
