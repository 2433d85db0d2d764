"""A decoder layer in ten kernels, instead of some forty operators.

For few tokens, each operator is a kernel of a few microseconds, whatever its size, so their number determines the time.
The kernels round where the model's own operators do. A token's bits depend only on tokens to which it attends: the
order of every sum depends only on the layer's sizes and the token's position, not on the width, the batch or the length
that is read. So no kernel may be recompiled for another number of tokens (`do_not_specialize`), and none adds
atomically.

Shapes: R rows of W tokens, T = R * W; heads of D numbers, a power of two; S slots of P positions. Products that are
split along their inputs consist of parts, float32, [splits, T, outputs], which the next kernel adds in order.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rows_of(x, first, tokens, inner, inputs, inside, rows: tl.constexpr):
    """A few inputs of a tile's tokens; zeros after the last token."""
    row = first + tl.arange(0, rows)
    place = row[:, None].to(tl.int64) * inner + inputs[None, :]
    return tl.load(x + place, mask=(row < tokens)[:, None] & inside[None, :], other=0.0)


@triton.jit
def _store_rows(out, tile, first, tokens, outputs, row_size, column, rows: tl.constexpr):
    row = first + tl.arange(0, rows)
    place = row[:, None].to(tl.int64) * row_size + column[None, :]
    tl.store(out + place, tile.to(out.dtype.element_ty), mask=(row < tokens)[:, None] & (column < outputs)[None, :])


@triton.jit
def _six_bits(scales, s):
    """The 6-bit scale and minimum of a sub-block of a Q4_K or Q5_K block. scales: its 12 bytes; s: 0 to 7."""
    is_early = s < 4
    first, second = tl.load(scales + s).to(tl.int32), tl.load(scales + tl.where(is_early, s + 4, s - 4)).to(tl.int32)
    third = tl.load(scales + tl.where(is_early, s, s + 4)).to(tl.int32)
    scale = tl.where(is_early, first & 63, (third & 15) | ((second >> 6) << 4))
    minimum = tl.where(is_early, second & 63, (third >> 4) | ((first >> 6) << 4))
    return scale.to(tl.float32), minimum.to(tl.float32)


@triton.jit
def _nibble(byte, is_high):
    return tl.where(is_high, byte.to(tl.int32) >> 4, byte.to(tl.int32) & 15)


@triton.jit
def _unpacked(codes, halves, row, inputs, row_bytes, kind: tl.constexpr):
    """Weights of a matrix of GGUF blocks, float32 [rows, inputs], for row [rows, 1] and inputs [1, inputs].

    codes: the matrix's bytes; halves: the same memory as float16. The layouts are those of ggml's `ggml-common.h`.
    """
    row = row.to(tl.int64) * row_bytes
    if kind == "Q8_0":
        block = row + inputs // 32 * 34
        code = tl.load(codes + block + 2 + inputs % 32).to(tl.int8, bitcast=True)
        return tl.load(halves + block // 2).to(tl.float32) * code.to(tl.float32)
    elif kind == "Q4_0":
        block, place = row + inputs // 32 * 18, inputs % 32
        code = _nibble(tl.load(codes + block + 2 + place % 16), place >= 16) - 8
        return tl.load(halves + block // 2).to(tl.float32) * code.to(tl.float32)
    elif kind == "Q6_K":
        block, half, place = row + inputs // 256 * 210, inputs % 256 // 128, inputs % 128
        low = _nibble(tl.load(codes + block + half * 64 + place % 64), place >= 64)
        high = tl.load(codes + block + 128 + half * 32 + place % 32).to(tl.int32) >> (place // 32 * 2)
        code = (low | ((high & 3) << 4)) - 32
        scale = tl.load(codes + block + 192 + half * 8 + place // 16).to(tl.int8, bitcast=True)
        return tl.load(halves + block // 2 + 104).to(tl.float32) * scale.to(tl.float32) * code.to(tl.float32)
    else:  # Q4_K, Q5_K
        size: tl.constexpr = 144 if kind == "Q4_K" else 176
        block, s, place = row + inputs // 256 * size, inputs % 256 // 32, inputs % 32
        code = _nibble(tl.load(codes + block + (size - 128) + s // 2 * 32 + place), s % 2 == 1)
        if kind == "Q5_K":
            code |= ((tl.load(codes + block + 16 + place).to(tl.int32) >> s) & 1) << 4
        scale, minimum = _six_bits(codes + block + 4, s)
        largest, least = tl.load(halves + block // 2).to(tl.float32), tl.load(halves + block // 2 + 1).to(tl.float32)
        return largest * scale * code.to(tl.float32) - least * minimum


@triton.jit(do_not_specialize=["count"])
def unpack(
    codes, halves, rows, out, count, inner, row_bytes, kind: tl.constexpr, group: tl.constexpr, block: tl.constexpr
):
    """Some rows [count] of a matrix of GGUF blocks, unpacked to out [count, inner], `group` rows in a program."""
    number = tl.program_id(0) * group + tl.arange(0, group)
    inputs = tl.program_id(1) * block + tl.arange(0, block)
    row = tl.load(rows + number, mask=number < count, other=0)
    values = _unpacked(codes, halves, row[:, None], tl.minimum(inputs, inner - 1)[None, :], row_bytes, kind)
    place = number[:, None].to(tl.int64) * inner + inputs[None, :]
    tl.store(out + place, values.to(out.dtype.element_ty), mask=(number < count)[:, None] & (inputs < inner)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def product(
    x,
    weight,
    halves,
    bias,
    out,
    tokens,
    inner,
    outputs,
    row_size,
    row_bytes,
    kind: tl.constexpr,
    has_bias: tl.constexpr,
    is_even: tl.constexpr,
    splits: tl.constexpr,
    tiles: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    step: tl.constexpr,
):
    """x [T, inner] times the transpose of weight [outputs, inner], plus bias [outputs].

    kind: the type of the weight's blocks (see `_unpacked`), which are rounded to x's type; empty for numbers.
    out: [T, row_size], or [splits, T, row_size] in float32, of which the first part has the bias; `outputs` columns are
    written. A program takes 1, 2 or 4 `tiles` of `rows` tokens, each with its own sums, so that weights are read once
    for all of them. rows: 16 or 32, which give the same bits: tensor cores take 16 rows at a time, and a row's sum
    takes in `step` inputs at a time, in ascending order. For 64 rows Hopper GPUs would use another instruction.
    is_even: inner is a multiple of `step` and outputs of `columns`.
    """
    first = tl.program_id(0) * (tiles * rows)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    split = tl.program_id(2)
    share = tl.cdiv(tl.cdiv(inner, step), splits) * step
    begin = split * share
    total = tl.zeros([rows, columns], tl.float32)
    if has_bias:
        total += tl.load(bias + column, mask=(column < outputs) & (split == 0), other=0.0).to(tl.float32)[None, :]
    total0, total1, total2, total3 = total, total, total, total
    for offset in range(begin, tl.minimum(begin + share, inner), step):
        inputs = offset + tl.arange(0, step)
        inside = inputs < inner
        if kind != "":
            near, known = tl.minimum(inputs, inner - 1), tl.minimum(column, outputs - 1)
            factors = _unpacked(weight, halves, known[:, None], near[None, :], row_bytes, kind).to(x.dtype.element_ty)
        else:
            place = weight + column[:, None].to(tl.int64) * inner + inputs[None, :]
            if is_even:
                factors = tl.load(place)
            else:
                factors = tl.load(place, mask=(column < outputs)[:, None] & inside[None, :], other=0.0)
        factors = tl.trans(factors)
        total0 = tl.dot(
            _rows_of(x, first, tokens, inner, inputs, inside, rows), factors, total0, input_precision="ieee"
        )
        if tiles > 1:
            other = _rows_of(x, first + rows, tokens, inner, inputs, inside, rows)
            total1 = tl.dot(other, factors, total1, input_precision="ieee")
        if tiles > 2:
            other = _rows_of(x, first + 2 * rows, tokens, inner, inputs, inside, rows)
            total2 = tl.dot(other, factors, total2, input_precision="ieee")
            other = _rows_of(x, first + 3 * rows, tokens, inner, inputs, inside, rows)
            total3 = tl.dot(other, factors, total3, input_precision="ieee")
    out += split.to(tl.int64) * tokens * row_size
    _store_rows(out, total0, first, tokens, outputs, row_size, column, rows)
    if tiles > 1:
        _store_rows(out, total1, first + rows, tokens, outputs, row_size, column, rows)
    if tiles > 2:
        _store_rows(out, total2, first + 2 * rows, tokens, outputs, row_size, column, rows)
        _store_rows(out, total3, first + 3 * rows, tokens, outputs, row_size, column, rows)


@triton.jit
def _summed(parts, place, inside, stride, splits: tl.constexpr, dtype: tl.constexpr):
    """The sum of a product's parts, which are `stride` apart, added in order and rounded."""
    total = tl.load(parts + place, mask=inside, other=0.0)
    for split in tl.static_range(1, splits):
        total += tl.load(parts + split * stride + place, mask=inside, other=0.0)
    return total.to(dtype)


@triton.jit
def _normalized(value, weight_at, size, inside, eps, offset, rounds_first: tl.constexpr, dtype: tl.constexpr):
    """RMSNorm of a vector, rounded to `dtype` before it is multiplied by `offset` plus weights if `rounds_first`."""
    wide = value.to(tl.float32)
    wide = wide * (1.0 / tl.sqrt(tl.sum(wide * wide) / size + eps))
    if rounds_first:
        wide = wide.to(dtype).to(tl.float32)
    return (wide * (offset + tl.load(weight_at, mask=inside, other=0.0).to(tl.float32))).to(dtype)


@triton.jit(do_not_specialize=["stride"])
def add_norm(
    x,
    residual,
    after_weight,
    next_weight,
    summed,
    out,
    size,
    stride,
    eps,
    offset,
    splits: tl.constexpr,
    has_after: tl.constexpr,
    has_residual: tl.constexpr,
    has_next: tl.constexpr,
    rounds_first: tl.constexpr,
    block: tl.constexpr,
):
    """For one token, x (normalized if `has_after`) plus `residual` -> `summed`; its norm -> `out`.

    x: [T, size], or parts of it; residual, summed, out: [T, size]; weights: [size], of norms.
    """
    dtype: tl.constexpr = summed.dtype.element_ty
    columns = tl.arange(0, block)
    inside = columns < size
    row = tl.program_id(0).to(tl.int64) * size + columns
    value = _summed(x, row, inside, stride, splits, dtype)
    if has_after:
        value = _normalized(value, after_weight + columns, size, inside, eps, offset, rounds_first, dtype)
    if has_residual:
        value = (tl.load(residual + row, mask=inside, other=0.0).to(tl.float32) + value.to(tl.float32)).to(dtype)
        tl.store(summed + row, value, mask=inside)
    if has_next:
        normalized = _normalized(value, next_weight + columns, size, inside, eps, offset, rounds_first, dtype)
        tl.store(out + row, normalized, mask=inside)


@triton.jit(do_not_specialize=["width", "stride"])
def rotate_and_cache(
    qkv,
    cosines,
    sines,
    queries_norm,
    keys_norm,
    slots,
    columns,
    queries,
    keys,
    values,
    eps,
    offset,
    heads,
    key_heads,
    slot_stride,
    head_stride,
    width,
    stride,
    splits: tl.constexpr,
    has_norms: tl.constexpr,
    rounds_first: tl.constexpr,
    half: tl.constexpr,
):
    """One head of a token of the joint product: stores its query, key or value, the first two normalized and rotated.

    qkv: [T, heads + 2 key heads, D], or parts of it; cosines, sines: [T, D]; slots: [R]; columns: [T]; queries: [T,
    heads, D]; keys, values: [S, key heads, P, D]; queries_norm, keys_norm: [D], weights. half: D / 2.
    """
    dtype: tl.constexpr = queries.dtype.element_ty
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size: tl.constexpr = 2 * half
    offsets = tl.arange(0, half)
    source = (token * (heads + 2 * key_heads) + head) * size + offsets
    low = _summed(qkv, source, offsets < half, stride, splits, dtype)
    high = _summed(qkv, source + half, offsets < half, stride, splits, dtype)
    slot, column = tl.load(slots + token // width), tl.load(columns + token)
    cached = slot * slot_stride + column * size + offsets
    if head >= heads + key_heads:
        place = values + cached + (head - heads - key_heads) * head_stride
        tl.store(place, low)
        tl.store(place + half, high)
    else:
        if has_norms:
            if head < heads:
                weight_low, weight_high = tl.load(queries_norm + offsets), tl.load(queries_norm + half + offsets)
            else:
                weight_low, weight_high = tl.load(keys_norm + offsets), tl.load(keys_norm + half + offsets)
            wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
            square = tl.sum(wide_low * wide_low) + tl.sum(wide_high * wide_high)
            factor = 1.0 / tl.sqrt(square / size + eps)
            wide_low, wide_high = wide_low * factor, wide_high * factor
            if rounds_first:
                wide_low, wide_high = wide_low.to(dtype).to(tl.float32), wide_high.to(dtype).to(tl.float32)
            low = (wide_low * (offset + weight_low.to(tl.float32))).to(dtype)
            high = (wide_high * (offset + weight_high.to(tl.float32))).to(dtype)
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


@triton.jit(do_not_specialize=["width", "first_column", "count", "chunks"])
def attend_chunk(
    queries,
    keys,
    values,
    slots,
    starts,
    positions,
    ancestors,
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
    first_column,
    count,
    chunks,
    before_own: tl.constexpr,
    is_branch: tl.constexpr,
    has_window: tl.constexpr,
    size: tl.constexpr,
    chunk: tl.constexpr,
    rows: tl.constexpr,
    step: tl.constexpr,
):
    """Attention of a few queries that share a key head over one chunk of the positions.

    queries: [T, heads, D]; keys, values: [S, key heads, P, D]; slots, starts: [R]; positions: [T], of the queries.
    `count` columns of each row from `first_column` on are computed. partial: [R, count, heads, chunks, D], leading and
    totals: [R, count, heads, chunks]: sums of values, largest scores and sums of weights, to be combined. rows: the
    largest number of queries of a program; step: positions of a block, of which `chunk` is a multiple.

    Chains take one call. Trees take two: one over the chunks that end before the row's own tokens begin (`before_own`),
    and one over the other chunks, with a program for each token (`is_branch`). ancestors: [R, W, W], of trees: entry
    [r, t, d] is the token of row r at position starts[r] + d of the text that ends with token t. So a token of a tree
    reads the keys that it would read in a chain, in the same places of the same blocks.
    """
    row, key_head = tl.program_id(0) // key_heads, tl.program_id(0) % key_heads
    start = tl.load(starts + row)
    group = heads // key_heads
    number = tl.program_id(2)
    lanes = tl.arange(0, rows)
    if is_branch:
        blocks = tl.cdiv(group, rows)
        number += (start // chunk).to(tl.int32)
        in_group = (tl.program_id(1) % blocks) * rows + lanes
        real = in_group < group
        in_group = tl.minimum(in_group, group - 1)
        column = tl.program_id(1) // blocks + lanes * 0
        end = tl.load(positions + row * width + first_column + tl.program_id(1) // blocks) + 1
        until = start + width
    else:
        index = tl.program_id(1) * rows + lanes
        real = index < count * group
        column, in_group = tl.minimum(index // group, count - 1), index % group
        end = start + width
        until = (start // chunk) * chunk if before_own else end
    token = row * width + first_column + column
    head = key_head * group + in_group
    place = ((row * count + column).to(tl.int64) * heads + head) * chunks + number
    first = number * chunk
    if (first < until) & (number < chunks):
        columns = tl.arange(0, size)
        query = tl.load(queries + (token.to(tl.int64) * heads + head)[:, None] * size + columns[None, :])
        position = tl.load(positions + token)
        base = tl.load(slots + row) * slot_stride + key_head.to(tl.int64) * head_stride
        best = tl.full([rows], float("-inf"), tl.float32)
        total = tl.zeros([rows], tl.float32)
        summed = tl.zeros([rows, size], tl.float32)
        for offset in range(0, chunk, step):
            seen = first + offset + tl.arange(0, step)
            inside = seen < end
            stands = seen.to(tl.int64)
            if is_branch:
                is_own = inside & (seen >= start)
                own_columns = ancestors + (row * width + first_column + tl.program_id(1) // blocks).to(tl.int64) * width
                stands = tl.where(is_own, start + tl.load(own_columns + (seen - start), mask=is_own, other=0), stands)
            allowed = (seen[None, :] <= position[:, None]) & inside[None, :]
            if has_window:
                allowed = allowed & (seen[None, :] > position[:, None] - window)
            cached = base + stands[:, None] * size + columns[None, :]
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


@triton.jit(do_not_specialize=["width", "first_column", "count", "chunks"])
def combine_chunks(
    partial,
    leading,
    totals,
    starts,
    out,
    heads,
    width,
    first_column,
    count,
    chunks,
    chunk: tl.constexpr,
    together: tl.constexpr,
    size: tl.constexpr,
):
    """Combines the chunks of a head of a token to its attention, `together` at a time. out: [T, heads, D].

    Chunks after a token's position add zeros, so neither their number nor the row's other tokens matter.
    """
    row, column, head = tl.program_id(0) // count, tl.program_id(0) % count, tl.program_id(1)
    columns, numbers = tl.arange(0, size), tl.arange(0, together)
    used = tl.minimum(tl.cdiv(tl.load(starts + row) + width, chunk), chunks)
    begin = (tl.program_id(0).to(tl.int64) * heads + head) * chunks
    best = float("-inf")
    for block in range(0, used, together):
        inside = block + numbers < used
        best = tl.maximum(best, tl.max(tl.load(leading + begin + block + numbers, mask=inside, other=float("-inf")), 0))
    total, summed = 0.0, tl.zeros([size], tl.float32)
    for block in range(0, used, together):
        place = begin + block + numbers
        inside = block + numbers < used
        share = tl.exp(tl.load(leading + place, mask=inside, other=float("-inf")) - best)
        total += tl.sum(share * tl.load(totals + place, mask=inside, other=0.0), 0)
        values = tl.load(partial + place[:, None] * size + columns[None, :], mask=inside[:, None], other=0.0)
        summed += tl.sum(share[:, None] * values, 0)
    token = (row * width + first_column + column).to(tl.int64)
    tl.store(out + (token * heads + head) * size + columns, (summed / total).to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["stride"])
def gate(gate_up, out, inner, stride, slope, cubic, splits: tl.constexpr, block: tl.constexpr):
    """x * sigmoid(slope * x + cubic * x^3), rounded, times up.

    gate_up: [T, 2 * inner], or parts of it; out: [T, inner].
    """
    dtype: tl.constexpr = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < inner
    place = token * 2 * inner + columns
    x = _summed(gate_up, place, inside, stride, splits, dtype).to(tl.float32)
    up = _summed(gate_up, place + inner, inside, stride, splits, dtype).to(tl.float32)
    active = (x / (1.0 + tl.exp(-(slope * x + cubic * x * x * x)))).to(dtype).to(tl.float32)
    tl.store(out + token * inner + columns, (active * up).to(dtype), mask=inside)
