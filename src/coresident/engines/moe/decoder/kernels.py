"""Triton kernels of one decode step: what is small is joined, so that a layer is a dozen launches, and experts are read by slot.

All sums are in float32 and in an order of their own, whatever is resident and wherever: an expert's product is computed by the
same programs in the same order in every slot. Weights may be stored in any float dtype or in 4 bits (`layout.record`).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm(
    residual,
    added,
    scales,
    norm,
    normed,
    eps,
    width,
    K: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """residual [B, H] += sum_k scales[b, k] * added[b, k] (K = 0: nothing); normed [B, H] = rms_norm(residual) * norm."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(residual + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if K > 0:
        total = tl.zeros([BLOCK], tl.float32)
        for k in tl.static_range(K):
            part = tl.load(added + (row * K + k) * width + at, mask=inside, other=0.0).to(tl.float32)
            if SCALED:
                part = part * tl.load(scales + row * K + k)
            total += part
        kind = residual.dtype.element_ty
        x = (x + total.to(kind).to(tl.float32)).to(kind).to(tl.float32)
        tl.store(residual + row * width + at, x.to(kind), mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    weight = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * width + at, (x * scale * weight).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def finish_qkv(
    qkv, query_norm, key_norm, cosines, sines, lengths, query, keys, values, eps, clip,
    stride_row, stride_head,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, FULL: tl.constexpr, CLIP: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Norm, clip and turn one head of one row; queries go to `query` [B, HEADS, D], the others into the cache at their position.

    `stride_row` and `stride_head` are the cache's. FULL: the norm is over all heads together.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    half = D // 2
    at = tl.arange(0, BLOCK)
    inside = at < half
    start = qkv + row * (HEADS + 2 * KV) * D
    kind = qkv.dtype.element_ty
    first = tl.load(start + head * D + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(start + head * D + half + at, mask=inside, other=0.0).to(tl.float32)
    position = tl.load(lengths + row)
    is_value = head >= HEADS + KV
    if head < HEADS + KV:
        is_query = head < HEADS
        weight, own, begin, count = key_norm, head - HEADS, HEADS * D, KV * D
        if is_query:
            weight, own, begin, count = query_norm, head, 0, HEADS * D
        if FULL:
            every = tl.arange(0, WIDE)
            whole = tl.load(start + begin + every, mask=every < count, other=0.0).to(tl.float32)
            mean = tl.sum(whole * whole, 0) / count
            weight += own * D
        else:
            mean = (tl.sum(first * first, 0) + tl.sum(second * second, 0)) / D
        scale = 1.0 / tl.sqrt(mean + eps)
        first *= scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        second *= scale * tl.load(weight + half + at, mask=inside, other=0.0).to(tl.float32)
        first, second = first.to(kind).to(tl.float32), second.to(kind).to(tl.float32)
    if CLIP:
        first = tl.minimum(tl.maximum(first, -clip), clip)
        second = tl.minimum(tl.maximum(second, -clip), clip)
    if head < HEADS + KV:
        cosine = tl.load(cosines + position * half + at, mask=inside, other=0.0)
        sine = tl.load(sines + position * half + at, mask=inside, other=0.0)
        turned = first * cosine - second * sine
        second = second * cosine + first * sine
        first = turned
    if head < HEADS:
        into = query + (row * HEADS + head) * D
    elif is_value:
        into = values + row * stride_row + (head - HEADS - KV) * stride_head + position * D
    else:
        into = keys + row * stride_row + (head - HEADS) * stride_head + position * D
    tl.store(into + at, first.to(kind), mask=inside)
    tl.store(into + half + at, second.to(kind), mask=inside)


@triton.jit
def attend(
    query, keys, values, lengths, out, scale, stride_row, stride_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one row over all its keys up to its position: softmax(q k^T * scale) v, online (arXiv 1805.02867)."""
    row, head = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < D
    q = tl.load(query + (row * HEADS + head) * D + at, mask=inside, other=0.0).to(tl.float32)
    start = row * stride_row + (head // GROUP) * stride_head
    count = tl.load(lengths + row) + 1
    most = tl.full([1], -1e30, tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([BLOCK], tl.float32)
    for first in range(0, count, BLOCK_T):
        where = first + tl.arange(0, BLOCK_T)
        seen = where < count
        place = start + where[:, None] * D + at[None, :]
        both = seen[:, None] & inside[None, :]
        k = tl.load(keys + place, mask=both, other=0.0).to(tl.float32)
        scores = tl.where(seen, tl.sum(k * q[None, :], 1) * scale, -1e30)
        higher = tl.maximum(most, tl.max(scores, 0))
        shrink = tl.exp(most - higher)
        weights = tl.where(seen, tl.exp(scores - higher), 0.0)
        v = tl.load(values + place, mask=both, other=0.0).to(tl.float32)
        mixed = mixed * shrink + tl.sum(v * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        most = higher
    tl.store(out + (row * HEADS + head) * D + at, (mixed / total).to(out.dtype.element_ty), mask=inside)


@triton.jit
def route(logits, chosen, weights, experts, K: tl.constexpr, NORMALISE: tl.constexpr, BLOCK: tl.constexpr):
    """The K likeliest of one row's experts, likeliest first, the lowest id among equals, and their softmax weights.

    Where a score is NaN or infinite nothing is likeliest: some expert is chosen, and the weights are NaN, which the logits show.
    """
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    scores = tl.load(logits + row * experts + at, mask=at < experts, other=-float("inf"))
    shares = tl.exp(scores - tl.max(scores, 0))
    shares = shares / tl.sum(shares, 0)
    total = 1.0
    if NORMALISE:
        total = 0.0
        left = shares
        for _ in tl.static_range(K):
            best = tl.max(left, 0)
            total += best
            left = tl.where(at == tl.min(tl.where(left == best, at, BLOCK), 0), -1.0, left)
    left = shares
    for k in tl.static_range(K):
        best = tl.max(left, 0)
        expert = tl.min(tl.where(left == best, at, BLOCK), 0)
        # Nothing equals NaN, and what is stored must be an expert all the same: it is where others read.
        tl.store(chosen + row * K + k, tl.minimum(expert, experts - 1))
        tl.store(weights + row * K + k, best / total)
        left = tl.where(at == expert, -1.0, left)


@triton.jit
def _product(
    x, weight, scales, row_of, rows, columns, slot, stride, scale_stride,
    Q4: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sum_c weight[slot, row, c] * x[c] for ROWS rows, [ROWS] in float32."""
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    inside = row_of[:, None] < rows
    if Q4:
        groups = columns // 64
        codes = weight + slot * stride + row_of[:, None].to(tl.int64) * (columns // 2)
        scale_at = scales + slot * scale_stride + row_of[:, None] * groups
        least_at = scale_at + rows * groups
        for first in range(0, columns // 2, BLOCK):
            byte = first + tl.arange(0, BLOCK)
            seen = inside & (byte[None, :] < columns // 2)
            group = byte // 32
            low_at = group * 64 + byte % 32
            code = tl.load(codes + byte[None, :], mask=seen, other=0).to(tl.int32)
            scale = tl.load(scale_at + group[None, :], mask=seen, other=0.0).to(tl.float32)
            least = tl.load(least_at + group[None, :], mask=seen, other=0.0).to(tl.float32)
            there = byte < columns // 2
            low = tl.load(x + low_at, mask=there, other=0.0).to(tl.float32)
            high = tl.load(x + low_at + 32, mask=there, other=0.0).to(tl.float32)
            total += ((code & 15).to(tl.float32) * scale + least) * low[None, :]
            total += ((code >> 4).to(tl.float32) * scale + least) * high[None, :]
    else:
        start = weight + slot * stride + row_of[:, None].to(tl.int64) * columns
        for first in range(0, columns, BLOCK):
            column = first + tl.arange(0, BLOCK)
            seen = inside & (column[None, :] < columns)
            part = tl.load(x + column, mask=column < columns, other=0.0).to(tl.float32)
            total += tl.load(start + column[None, :], mask=seen, other=0.0).to(tl.float32) * part[None, :]
    return tl.sum(total, 1)


@triton.jit
def gate_up(
    x, chosen, slots, weight, scales, inner, hidden, width, stride, scale_stride,
    K: tl.constexpr, Q4: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """inner [B K, I] = silu(gate x) * up x of each row's experts; nothing for one that has no slot."""
    pair = tl.program_id(0)
    slot = tl.load(slots + tl.load(chosen + pair)).to(tl.int64)
    if slot >= 0:
        at = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        inside = at < width
        row = x + (pair // K) * hidden
        up_at = tl.where(inside, at + width, 2 * width)
        gate_at = tl.where(inside, at, 2 * width)
        gate = _product(
            row, weight, scales, gate_at, 2 * width, hidden, slot, stride, scale_stride, Q4, ROWS, BLOCK
        )
        up = _product(
            row, weight, scales, up_at, 2 * width, hidden, slot, stride, scale_stride, Q4, ROWS, BLOCK
        )
        tl.store(inner + pair * width + at, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


@triton.jit
def down(
    inner, chosen, slots, weight, scales, out, hidden, width, stride, scale_stride,
    Q4: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [B K, H] = down inner of each row's experts; nothing for one that has no slot."""
    pair = tl.program_id(0)
    slot = tl.load(slots + tl.load(chosen + pair)).to(tl.int64)
    if slot >= 0:
        at = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        row = inner + pair * width
        total = _product(row, weight, scales, at, hidden, width, slot, stride, scale_stride, Q4, ROWS, BLOCK)
        tl.store(out + pair * hidden + at, total, mask=at < hidden)
