"""How much is there at a time: rows of logits, numbers of an optimiser. Needs no torch: what a run will take is foretold
with it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

# Of float32 logits: large enough to fill a GPU (440 rows of 152k tokens), small beside a layer's activations.
BUDGET = 256 * 2**20
# Numbers that the 8-bit optimiser updates at a time: enough to fill a GPU, and 18 MiB of what it needs meanwhile.
CHUNK = 1 << 20
# Rows of a chunk come in multiples of this, where there are as many: the tiles of matrix products.
_TILE = 64


def chunk_rows(rows: int, vocabulary: int, width: int, budget: int = BUDGET) -> int:
    """How many rows a chunk has, such that chunks are about equal and `width`-byte logits fit the budget."""
    most = max(1, budget // (vocabulary * width))
    if most > _TILE:
        most -= most % _TILE
    chunks = -(-rows // most)
    return min(most, -(-rows // max(chunks, 1) // _TILE) * _TILE) if chunks > 1 else max(rows, 1)


def together(sizes: Sequence[int], most: int = CHUNK) -> Iterator[list[int]]:
    """Which of the tensors of so many numbers are updated together, in their order: as many as have `most`, or one."""
    chunk: list[int] = []
    held = 0
    for number, size in enumerate(sizes):
        if chunk and held + size > most:
            yield chunk
            chunk, held = [], 0
        chunk.append(number)
        held += size
    if chunk:
        yield chunk
