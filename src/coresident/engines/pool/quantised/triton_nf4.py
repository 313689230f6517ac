"""The kernel of `kernel`, for Triton to compile: imported where it is first used, since Triton is."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def nf4_dequantise(  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    packed_at,
    absmax_at,
    nested_absmax_at,
    table_at,
    nested_table_at,
    out_at,
    offset,
    blocks,
    count,
    bytes_,
    BLOCK: tl.constexpr,  # noqa: N803
    NESTED: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
):
    """`count` numbers in `blocks` blocks, from `bytes_` bytes at `packed_at` (two a byte) to `out_at`, in its type; a
    program does ROWS blocks.
    """
    # 64-bit: a weight may have more numbers than 31 bits count.
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = block < blocks
    index = tl.load(absmax_at + block, mask=there, other=0)
    largest = tl.load(nested_absmax_at + block // NESTED, mask=there, other=0.0)
    scale = (tl.load(nested_table_at + index.to(tl.int32)) * largest + offset)[:, None]
    # Both numbers of a byte lie in one block, whose size is even.
    place = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    packed = tl.load(packed_at + place, mask=place < bytes_, other=0)
    first = tl.load(table_at + (packed >> 4).to(tl.int32)) * scale
    second = tl.load(table_at + (packed & 15).to(tl.int32)) * scale
    both = tl.interleave(first, second)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out_at + at, both.to(out_at.dtype.element_ty), mask=at < count)
