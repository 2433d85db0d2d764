/* Plain C: the specification of all other variants, which give the same bits. */
#pragma once

enum { SUBTRACTS_128 = 0 }; /* whether `add_dot` subtracts 128 from codes of 8 bits */

typedef struct { float v[16]; } floats;
typedef struct { int32_t v[16]; } ints;
typedef struct { uint8_t v[64]; } bytes;

#define EACH for (int i = 0; i < 16; i++)

ALWAYS floats load_floats(const float *from) { floats y; memcpy(y.v, from, sizeof y.v); return y; }
ALWAYS void store_floats(float *to, floats x) { memcpy(to, x.v, sizeof x.v); }
ALWAYS floats all_floats(float x) { floats y; EACH y.v[i] = x; return y; }
ALWAYS floats add_floats(floats a, floats b) { EACH a.v[i] += b.v[i]; return a; }
ALWAYS floats subtract_floats(floats a, floats b) { EACH a.v[i] -= b.v[i]; return a; }
ALWAYS floats multiply_floats(floats a, floats b) { EACH a.v[i] *= b.v[i]; return a; }
ALWAYS floats divide_floats(floats a, floats b) { EACH a.v[i] /= b.v[i]; return a; }
ALWAYS floats max_floats(floats a, floats b) { EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
ALWAYS floats min_floats(floats a, floats b) { EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
/* Of all numbers of both; NaN if one is NaN. Without the sign, bits have the order of the numbers. */
ALWAYS float largest_magnitude(floats x, floats y) {
    uint32_t most = 0, bits[2];
    EACH {
        memcpy(bits, &x.v[i], 4), memcpy(bits + 1, &y.v[i], 4);
        for (int j = 0; j < 2; j++) most = (bits[j] & 0x7fffffff) > most ? bits[j] & 0x7fffffff : most;
    }
    float value;
    memcpy(&value, &most, 4);
    return value;
}
ALWAYS floats add_product(floats sum, floats a, floats b) { EACH sum.v[i] = fmaf(a.v[i], b.v[i], sum.v[i]); return sum; }
ALWAYS floats take_product(floats sum, floats a, floats b) {
    EACH sum.v[i] = fmaf(-a.v[i], b.v[i], sum.v[i]);
    return sum;
}
/* x where first <= lane <= last, else y. */
ALWAYS floats only_lanes(floats x, int first, int last, floats y) {
    EACH x.v[i] = i >= first && i <= last ? x.v[i] : y.v[i];
    return x;
}
ALWAYS floats nearest(floats x) { EACH x.v[i] = rintf(x.v[i]); return x; }
ALWAYS float largest(floats x) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) x.v[i] = x.v[i] > x.v[i + half] ? x.v[i] : x.v[i + half];
    return x.v[0];
}
ALWAYS float sum_of(floats x) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) x.v[i] += x.v[i + half];
    return x.v[0];
}
ALWAYS floats power_of_two(floats n) {
    EACH {
        uint32_t bits = (uint32_t)(lrintf(n.v[i]) + 127) << 23;
        memcpy(&n.v[i], &bits, 4);
    }
    return n;
}

ALWAYS ints all_ints(int32_t x) { ints y; EACH y.v[i] = x; return y; }
/* NaN and numbers that are too large become INT32_MIN, as by the instructions. */
ALWAYS ints to_ints(floats x) {
    ints y;
    EACH y.v[i] = x.v[i] >= -0x1p31f && x.v[i] < 0x1p31f ? (int32_t)lrintf(x.v[i]) : INT32_MIN;
    return y;
}
ALWAYS floats to_floats(ints x) { floats y; EACH y.v[i] = (float)x.v[i]; return y; }
ALWAYS ints add_ints(ints a, ints b) { EACH a.v[i] = (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i]); return a; }
ALWAYS ints subtract_ints(ints a, ints b) { EACH a.v[i] = (int32_t)((uint32_t)a.v[i] - (uint32_t)b.v[i]); return a; }
ALWAYS ints over_128(ints x) { EACH x.v[i] >>= 7; return x; }
ALWAYS int32_t int_sum(ints x) { int32_t sum = 0; EACH sum += x.v[i]; return sum; }
ALWAYS void store_narrow(uint8_t *to, ints x) { EACH to[i] = (uint8_t)x.v[i]; }
ALWAYS ints times_128(ints x) { EACH x.v[i] = (int32_t)((uint32_t)x.v[i] << 7); return x; }

ALWAYS floats load_halves(const uint8_t *from) {
    floats y;
    EACH {
        uint16_t half;
        memcpy(&half, from + 2 * i, 2);
        y.v[i] = half_to_float(half);
    }
    return y;
}
/* x is at most LARGEST_HALF, or NaN. */
ALWAYS uint16_t float_to_half(float x) {
    uint32_t bits, sign;
    memcpy(&bits, &x, 4);
    sign = bits >> 16 & 0x8000, bits &= 0x7fffffff;
    if (x != x) return (uint16_t)(sign | 0x7e00);
    if (bits < 0x38800000) return (uint16_t)(sign | (uint32_t)lrintf(fabsf(x) * 0x1p24f)); /* less than 2^-14 */
    return (uint16_t)(sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}
ALWAYS void store_rounded_halves(uint16_t *to, floats x) { EACH to[i] = float_to_half(x.v[i]); }
ALWAYS floats load_unsigned(const uint8_t *from) { floats y; EACH y.v[i] = from[i]; return y; }
ALWAYS floats load_signed(const uint8_t *from) { floats y; EACH y.v[i] = (int8_t)from[i]; return y; }
ALWAYS floats load_powers(const uint8_t *from) {
    floats y;
    EACH {
        int32_t e = from[i], bits = e < 2 ? 0x00200000 << e : (e - 1) << 23;
        memcpy(&y.v[i], &bits, 4);
    }
    return y;
}
ALWAYS floats load_small_floats(const uint8_t *from) {
    floats y;
    EACH y.v[i] = half_to_float((uint16_t)(from[i] << 7));
    return y;
}

ALWAYS bytes load_bytes(const uint8_t *from) { bytes y; memcpy(y.v, from, sizeof y.v); return y; }
ALWAYS bytes low_bits(bytes x) { for (int i = 0; i < 64; i++) x.v[i] &= 15; return x; }
ALWAYS bytes high_bits(bytes x) { for (int i = 0; i < 64; i++) x.v[i] >>= 4; return x; }
ALWAYS bytes with_bits(bytes x, bytes y, const int at, const int count, const int to) {
    for (int i = 0; i < 64; i++) x.v[i] |= (uint8_t)((y.v[i] >> at & ((1 << count) - 1)) << to);
    return x;
}
ALWAYS bytes load_table(const uint8_t *from) { bytes y; for (int i = 0; i < 64; i++) y.v[i] = from[i % 16]; return y; }
ALWAYS bytes look_up(bytes table, bytes x) { for (int i = 0; i < 64; i++) x.v[i] = table.v[x.v[i]]; return x; }
ALWAYS ints add_dot(ints sum, bytes codes, const uint8_t *x, const int bits) {
    (void)bits;
    EACH for (int j = 0; j < 4; j++) sum.v[i] += codes.v[4 * i + j] * (int8_t)x[j];
    return sum;
}

/* Into the first level of the caches, and into the second. */
ALWAYS void prefetch(const uint8_t *from) { (void)from; }
ALWAYS void prefetch_later(const uint8_t *from) { (void)from; }

/* 16 rows of 16 numbers, `stride` apart, to columns `step` apart. */
ALWAYS void transpose(const float *from, int64_t stride, float *to, int64_t step) {
    EACH for (int j = 0; j < 16; j++) to[j * step + i] = from[i * stride + j];
}
