"""How many rows of logits are there at a time. Needs no torch: what a run will take is foretold with it too."""

from __future__ import annotations

# Of float32 logits: large enough to fill a GPU (440 rows of 152k tokens), small beside a layer's activations.
BUDGET = 256 * 2**20
# Rows of a chunk come in multiples of this, where there are as many: the tiles of matrix products.
_TILE = 64


def chunk_rows(rows: int, vocabulary: int, width: int, budget: int = BUDGET) -> int:
    """How many rows a chunk has, such that chunks are about equal and `width`-byte logits fit the budget."""
    most = max(1, budget // (vocabulary * width))
    if most > _TILE:
        most -= most % _TILE
    chunks = -(-rows // most)
    return min(most, -(-rows // max(chunks, 1) // _TILE) * _TILE) if chunks > 1 else max(rows, 1)
