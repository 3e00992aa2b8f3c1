"""Data: documents, packed into rows of one length, in an order that the seed and the step alone decide.

    documents = fcp.data.read("book.txt", checkpoint=folder)
    data = fcp.data.pack(documents, seq=1024, batch=8, seed=0)
    state = data.init()
    batch, state = data.batch(state)

Problem. Runs on two meshes can be compared only if step 17 sees the same rows on both, and a run that was interrupted
is the same run only if it goes on where it stopped. An order that depends on how many workers read, or on what was
drawn before, gives neither.

Idea. Row number i of a run is a pure function of (documents, seq, seed, i): each pass over the rows has an order of its
own, drawn from the seed and the number of the pass. So the position in the data is one count, `DataState`, that fits
into a checkpoint, and (state) -> (batch, state) is a pure pair. On processes a rank of dp or fsdp takes its part of the
batch's rows (`part_of`), and the ranks of a cp or tp group, whose part is the same, take the same rows.

Packed, documents follow one another without a gap, and positions restart with each one and with each row, whose end may
cut one. The last row is filled up with padding. With `overlap=1` a row begins with the last token of the row before, so
that each token but a document's first is predicted exactly once a pass: what a perplexity wants.

Left out: a text that is larger than memory (its tokens, 4 bytes each, are held by every process), and documents that
are kept whole by leaving gaps.
"""

from fcp.data._documents import Documents, check_vocabulary, of_tokens, read, read_text, sections, tokens
from fcp.data._rows import DataState, Packed, pack, part_of

__all__ = [
    "DataState",
    "Documents",
    "Packed",
    "check_vocabulary",
    "of_tokens",
    "pack",
    "part_of",
    "read",
    "read_text",
    "sections",
    "tokens",
]
