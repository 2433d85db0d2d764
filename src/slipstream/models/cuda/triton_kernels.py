"""What a decoder layer computes beside its matrix products, in five kernels instead of some forty operators.

At decoding widths each operator is a kernel of a few microseconds, whatever its size, so their number is their time.
The kernels round where the model's own operators do. A token's numbers depend on no other token of the forward but
those it attends to, and sums run in an order that its position alone decides.

Shapes: R rows of W tokens, T = R * W; heads of D numbers, a power of two; S slots of P positions.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _normalised(value, weight_at, size, inside, eps, rounds_first: tl.constexpr, dtype: tl.constexpr):
    """RMSNorm of a vector, rounded to `dtype` before it is multiplied by the weights if `rounds_first`, and after."""
    wide = value.to(tl.float32)
    wide = wide * (1.0 / tl.sqrt(tl.sum(wide * wide) / size + eps))
    if rounds_first:
        wide = wide.to(dtype).to(tl.float32)
    return (wide * tl.load(weight_at, mask=inside, other=0.0)).to(dtype)


@triton.jit
def add_norm(
    x,
    residual,
    after_weight,
    next_weight,
    summed,
    out,
    size,
    after_eps,
    next_eps,
    has_after: tl.constexpr,
    has_residual: tl.constexpr,
    has_next: tl.constexpr,
    rounds_first: tl.constexpr,
    block: tl.constexpr,
):
    """For one token, x (normalised if `has_after`) plus `residual` -> `summed`; that normalised -> `out`.

    x, residual, summed, out: [T, size]; weights: [size], float32.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    columns = tl.arange(0, block)
    inside = columns < size
    row = tl.program_id(0).to(tl.int64) * size + columns
    value = tl.load(x + row, mask=inside, other=0.0)
    if has_after:
        value = _normalised(value, after_weight + columns, size, inside, after_eps, rounds_first, dtype)
    if has_residual:
        value = (tl.load(residual + row, mask=inside, other=0.0).to(tl.float32) + value.to(tl.float32)).to(dtype)
        tl.store(summed + row, value, mask=inside)
    if has_next:
        normalised = _normalised(value, next_weight + columns, size, inside, next_eps, rounds_first, dtype)
        tl.store(out + row, normalised, mask=inside)


@triton.jit(do_not_specialize=["width"])
def rotate_and_cache(
    qkv,
    cosines,
    sines,
    weights,
    slots,
    columns,
    queries,
    keys,
    values,
    eps,
    heads,
    key_heads,
    slot_stride,
    head_stride,
    width,
    has_norms: tl.constexpr,
    rounds_first: tl.constexpr,
    half: tl.constexpr,
):
    """A head of a token out of the joint product: normalised and rotated queries, and keys and values to the cache.

    qkv: [T, heads + 2 key heads, D]; cosines, sines: [T, D]; slots: [R]; columns: [T]; queries: [T, heads, D]; keys,
    values: [S, key heads, P, D]; weights: [2, D], of the norms of queries and keys, float32. half: D / 2.
    """
    dtype: tl.constexpr = qkv.dtype.element_ty
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size: tl.constexpr = 2 * half
    offsets = tl.arange(0, half)
    source = qkv + (token * (heads + 2 * key_heads) + head) * size
    low, high = tl.load(source + offsets), tl.load(source + half + offsets)
    slot, column = tl.load(slots + token // width), tl.load(columns + token)
    cached = slot * slot_stride + column * size + offsets
    if head >= heads + key_heads:
        place = values + cached + (head - heads - key_heads) * head_stride
        tl.store(place, low)
        tl.store(place + half, high)
    else:
        if has_norms:
            weight = weights + tl.where(head < heads, 0, size)
            wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
            square = tl.sum(wide_low * wide_low) + tl.sum(wide_high * wide_high)
            factor = 1.0 / tl.sqrt(square / size + eps)
            wide_low, wide_high = wide_low * factor, wide_high * factor
            if rounds_first:
                wide_low, wide_high = wide_low.to(dtype).to(tl.float32), wide_high.to(dtype).to(tl.float32)
            low = (wide_low * tl.load(weight + offsets)).to(dtype)
            high = (wide_high * tl.load(weight + half + offsets)).to(dtype)
        angle = token * size + offsets
        cos_low, cos_high = tl.load(cosines + angle), tl.load(cosines + half + angle)
        sin_low, sin_high = tl.load(sines + angle), tl.load(sines + half + angle)
        straight_low = (low.to(tl.float32) * cos_low.to(tl.float32)).to(dtype).to(tl.float32)
        straight_high = (high.to(tl.float32) * cos_high.to(tl.float32)).to(dtype).to(tl.float32)
        turned_low = (-high.to(tl.float32) * sin_low.to(tl.float32)).to(dtype).to(tl.float32)
        turned_high = (low.to(tl.float32) * sin_high.to(tl.float32)).to(dtype).to(tl.float32)
        rotated_low, rotated_high = (straight_low + turned_low).to(dtype), (straight_high + turned_high).to(dtype)
        if head < heads:
            place = queries + (token * heads + head) * size + offsets
            tl.store(place, rotated_low)
            tl.store(place + half, rotated_high)
        else:
            place = keys + cached + (head - heads) * head_stride
            tl.store(place, rotated_low)
            tl.store(place + half, rotated_high)


@triton.jit(do_not_specialize=["width", "chunks"])
def attend_chunk(
    queries,
    keys,
    values,
    slots,
    starts,
    positions,
    visible,
    depths,
    partial,
    leading,
    totals,
    scale,
    window,
    heads,
    key_heads,
    slot_stride,
    head_stride,
    width,
    chunks,
    is_tree: tl.constexpr,
    has_window: tl.constexpr,
    size: tl.constexpr,
    chunk: tl.constexpr,
    rows: tl.constexpr,
    step: tl.constexpr,
):
    """Attention of a few queries that share a key head over one chunk of the positions.

    queries: [T, heads, D]; keys, values: [S, key heads, P, D]; slots, starts: [R]; positions: [T], of the queries;
    visible: [R, W, W], which of the forward's own tokens a query sees, and depths: [R, W], how far these are behind
    their row's first, both for trees. partial: [T, heads, chunks, D], leading and totals: [T, heads, chunks]: sums of
    values, largest scores and sums of weights, to be combined. rows: queries of a program, at most; step: positions of
    a block, by which `chunk` can be divided.
    """
    row, key_head = tl.program_id(0) // key_heads, tl.program_id(0) % key_heads
    number = tl.program_id(2)
    group = heads // key_heads
    index = tl.program_id(1) * rows + tl.arange(0, rows)
    real = index < width * group
    token = row * width + tl.minimum(index // group, width - 1)
    head = key_head * group + index % group
    start = tl.load(starts + row)
    place = (token.to(tl.int64) * heads + head) * chunks + number
    first = number * chunk
    if first < start + width:
        columns = tl.arange(0, size)
        query = tl.load(queries + (token.to(tl.int64) * heads + head)[:, None] * size + columns[None, :])
        position = tl.load(positions + token)
        base = tl.load(slots + row) * slot_stride + key_head.to(tl.int64) * head_stride
        best = tl.full([rows], float("-inf"), tl.float32)
        total = tl.zeros([rows], tl.float32)
        summed = tl.zeros([rows, size], tl.float32)
        for offset in range(0, chunk, step):
            seen = first + offset + tl.arange(0, step)
            inside = seen < start + width
            behind = seen - start
            allowed = (seen[None, :] <= position[:, None]) & inside[None, :]
            key_position = seen
            if is_tree:
                is_own_token = (behind >= 0) & inside
                tree = tl.load(
                    visible + (token[:, None].to(tl.int64) * width) + behind[None, :],
                    mask=is_own_token[None, :] & real[:, None],
                    other=0,
                )
                allowed = tl.where(is_own_token[None, :], tree != 0, (behind < 0)[None, :])
                key_position = tl.where(
                    is_own_token, start + tl.load(depths + row * width + behind, mask=is_own_token, other=0), seen
                )
            if has_window:
                allowed = allowed & (key_position[None, :] > position[:, None] - window)
            cached = base + seen[:, None].to(tl.int64) * size + columns[None, :]
            key = tl.load(keys + cached, mask=inside[:, None], other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            scores = tl.where(allowed, scores, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, 1))
            finite = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp(scores - finite[:, None])
            kept = tl.exp(best - finite)
            value = tl.load(values + cached, mask=inside[:, None], other=0.0)
            total = total * kept + tl.sum(weights, 1)
            summed = summed * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            best = higher
        tl.store(partial + place[:, None] * size + columns[None, :], summed, mask=real[:, None])
        tl.store(leading + place, best, mask=real)
        tl.store(totals + place, total, mask=real)


@triton.jit(do_not_specialize=["width", "chunks"])
def combine_chunks(
    partial, leading, totals, starts, out, heads, width, chunks, chunk: tl.constexpr, size: tl.constexpr
):
    """The attention of a head of a token out of its chunks, which come in order. out: [T, heads, D].

    Padding may reach beyond the last chunk, and sees nothing there.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, size)
    used = tl.minimum(tl.cdiv(tl.load(starts + token // width) + width, chunk), chunks)
    begin = (token.to(tl.int64) * heads + head) * chunks
    best = float("-inf")
    for number in range(0, used):
        best = tl.maximum(best, tl.load(leading + begin + number))
    total, summed = 0.0, tl.zeros([size], tl.float32)
    for number in range(0, used):
        share = tl.exp(tl.load(leading + begin + number) - best)
        total += share * tl.load(totals + begin + number)
        summed += share * tl.load(partial + (begin + number) * size + columns)
    tl.store(out + (token.to(tl.int64) * heads + head) * size + columns, (summed / total).to(out.dtype.element_ty))


@triton.jit
def gate(gate_up, out, inner, slope, cubic, block: tl.constexpr):
    """x * sigmoid(slope * x + cubic * x^3), rounded, times up. gate_up: [T, 2 * inner]; out: [T, inner]."""
    dtype: tl.constexpr = gate_up.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < inner
    x = tl.load(gate_up + token * 2 * inner + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * inner + inner + columns, mask=inside, other=0.0).to(tl.float32)
    active = (x / (1.0 + tl.exp(-(slope * x + cubic * x * x * x)))).to(dtype).to(tl.float32)
    tl.store(out + token * inner + columns, (active * up).to(dtype), mask=inside)
