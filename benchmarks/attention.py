"""What a mask costs: attention alone, forward and backward, 8,192 tokens, 8 heads of 32, float32.

    python benchmarks/attention.py

Each kind of mask against plain causal attention by the same door, in turns; against a dense mask, as other systems
build it (torch's own call with a [seq, seq] mask); and against what one would write by hand: a call a document, torch's
own call for the plain triangle, the rows of a padded batch without their padding. Then the peak memory of a step on
32,768 packed tokens against that of the loop over documents.
"""

import sys
from collections.abc import Callable

import torch
from measure import peak_mb, print_rows, ratios, report_peak
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import fcp

SEQ, HEADS, DIM, LONG = 8192, 8, 32, 32768


def tensors(seq: int, batch: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, HEADS, seq, DIM, generator=generator).requires_grad_() for _ in range(3)]


def uneven(seq: int, count: int = 37) -> list[int]:
    """Lengths of `count` documents that add up to `seq`, the longest some dozen times the shortest."""
    shares = torch.rand(count, generator=torch.Generator().manual_seed(1)).pow(2) + 0.05
    lengths = (shares / shares.sum() * seq).long().clamp(min=1)
    lengths[-1] += seq - lengths.sum()
    return lengths.tolist()


def positions_of(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def step(fn: Callable[..., Tensor], given: list[Tensor]) -> Callable[[], None]:
    """Forward and backward; the gradients are let go, so that memory before a step is the operands' alone."""

    def run() -> None:
        torch.autograd.grad(fn(*given).square().sum(), given)

    return run


def by_fcp(given: list[Tensor], mask: fcp.Mask, **words: int) -> Callable[[], None]:
    return step(lambda q, k, v: fcp.attention(q, k, v, mask, **words), given)


def by_documents(given: list[Tensor], lengths: list[int]) -> Callable[[], None]:
    """One call a document, as one writes it by hand."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
        return torch.cat([scaled_dot_product_attention(*part, is_causal=True) for part in parts], 2)

    return step(fn, given)


def by_dense_mask(given: list[Tensor], mask: fcp.Mask) -> Callable[[], None]:
    allowed = fcp.masks.materialize(mask)
    return step(lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=allowed), given)


def main() -> int:
    torch.set_num_threads(2)
    given, row = tensors(SEQ), torch.arange(SEQ)[None]
    plain, lengths = fcp.masks.describe(row), uneven(SEQ)
    packed = fcp.masks.describe(positions_of(lengths))
    of_plain = ratios(
        by_fcp(given, plain),
        {
            "torch": step(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), given),
            "equal": by_fcp(given, fcp.masks.describe(row % (SEQ // 16))),
            "window": by_fcp(given, plain, window=512),
            "chunk": by_fcp(given, plain, chunk=512),
            "dense": by_dense_mask(given, packed),
            "uneven": by_fcp(given, packed),
        },
    )
    of_loop = ratios(by_documents(given, lengths), {"uneven": by_fcp(given, packed)})
    half = SEQ // 2
    rows = tensors(half, 2)
    left = fcp.masks.describe(
        torch.arange(half).expand(2, -1), valid=torch.stack([torch.arange(half) >= half // 2, torch.arange(half) >= 0])
    )

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        short = [x[:1, :, half // 2 :] for x in (q, k, v)]
        whole = [x[1:] for x in (q, k, v)]
        one, other = (scaled_dot_product_attention(*part, is_causal=True) for part in (short, whole))
        return torch.cat([one.flatten(), other.flatten()])

    of_rows = ratios(step(alone, rows), {"left": by_fcp(rows, left)})
    good = print_rows(
        f"{SEQ:,} tokens, as a ratio to plain causal attention",
        [
            ("16 equal documents", of_plain["equal"], 0.18),
            ("37 uneven documents", of_plain["uneven"], None),
            ("a window of 512", of_plain["window"], 0.36),
            ("chunks of 512", of_plain["chunk"], None),
            ("plain causal, against torch's own call", 1 / of_plain["torch"], 1.02),
            ("torch's own call with a dense mask of the 37 documents", of_plain["dense"], None),
        ],
    )
    good &= print_rows(
        "as a ratio to what one would write by hand",
        [
            ("37 uneven documents, to a loop over them", of_loop["uneven"], 1.25),
            ("a left-padded batch, to its rows unpadded", of_rows["left"], 1.05),
        ],
    )
    memory = peak_mb(__file__, "fcp") / peak_mb(__file__, "loop")
    good &= print_rows(f"peak memory, {LONG:,} packed tokens", [("to the loop over documents", memory, 1.1)])
    return 0 if good else 1


def peak(which: str) -> None:
    torch.set_num_threads(2)
    given, lengths = tensors(LONG), uneven(LONG)
    mask = fcp.masks.describe(positions_of(lengths))
    report_peak(by_fcp(given, mask) if which == "fcp" else by_documents(given, lengths))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peak"]:
        peak(sys.argv[2])
    else:
        sys.exit(main())
