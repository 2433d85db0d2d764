/* AVX-512 with VNNI. */
#pragma once

enum { SUBTRACTS_128 = 0 }; /* whether `add_dot` subtracts 128 from codes of 8 bits */

#include <immintrin.h>

typedef __m512 floats;
typedef __m512i ints, bytes;

ALWAYS floats load_floats(const float *from) { return _mm512_loadu_ps(from); }
ALWAYS void store_floats(float *to, floats x) { _mm512_storeu_ps(to, x); }
ALWAYS floats all_floats(float x) { return _mm512_set1_ps(x); }
ALWAYS floats add_floats(floats a, floats b) { return _mm512_add_ps(a, b); }
ALWAYS floats subtract_floats(floats a, floats b) { return _mm512_sub_ps(a, b); }
ALWAYS floats multiply_floats(floats a, floats b) { return _mm512_mul_ps(a, b); }
ALWAYS floats divide_floats(floats a, floats b) { return _mm512_div_ps(a, b); }
ALWAYS floats max_floats(floats a, floats b) { return _mm512_max_ps(a, b); }
ALWAYS floats min_floats(floats a, floats b) { return _mm512_min_ps(a, b); }
/* Of all numbers of both; NaN if one is NaN. Without the sign, bits have the order of the numbers. */
ALWAYS float largest_magnitude(floats x, floats y) {
    __m512i a = _mm512_castps_si512(_mm512_abs_ps(x)), b = _mm512_castps_si512(_mm512_abs_ps(y));
    int32_t bits = _mm512_reduce_max_epi32(_mm512_max_epi32(a, b));
    float most;
    memcpy(&most, &bits, 4);
    return most;
}
ALWAYS floats add_product(floats sum, floats a, floats b) { return _mm512_fmadd_ps(a, b, sum); }
ALWAYS floats take_product(floats sum, floats a, floats b) { return _mm512_fnmadd_ps(a, b, sum); }
/* x where first <= lane <= last, else y. */
ALWAYS floats only_lanes(floats x, int first, int last, floats y) {
    __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __mmask16 in = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(first));
    return _mm512_mask_blend_ps(_mm512_mask_cmple_epi32_mask(in, lane, _mm512_set1_epi32(last)), y, x);
}
ALWAYS floats nearest(floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }
ALWAYS float largest(floats x) { return _mm512_reduce_max_ps(x); }
ALWAYS float sum_of(floats x) {
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
ALWAYS floats power_of_two(floats n) {
    __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(e, 23));
}

ALWAYS ints all_ints(int32_t x) { return _mm512_set1_epi32(x); }
ALWAYS ints to_ints(floats x) { return _mm512_cvtps_epi32(x); }
ALWAYS floats to_floats(ints x) { return _mm512_cvtepi32_ps(x); }
ALWAYS ints add_ints(ints a, ints b) { return _mm512_add_epi32(a, b); }
ALWAYS ints subtract_ints(ints a, ints b) { return _mm512_sub_epi32(a, b); }
ALWAYS ints over_128(ints x) { return _mm512_srai_epi32(x, 7); }
ALWAYS int32_t int_sum(ints x) { return _mm512_reduce_add_epi32(x); }
ALWAYS void store_narrow(uint8_t *to, ints x) { _mm_storeu_si128((void *)to, _mm512_cvtepi32_epi8(x)); }
ALWAYS ints times_128(ints x) { return _mm512_slli_epi32(x, 7); }

/* 16 float16 numbers, bytes and signed bytes. */
ALWAYS floats load_halves(const uint8_t *from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)from)); }
ALWAYS void store_rounded_halves(uint16_t *to, floats x) {
    _mm256_storeu_si256((void *)to, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
ALWAYS floats load_unsigned(const uint8_t *from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)from)));
}
ALWAYS floats load_signed(const uint8_t *from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)from)));
}
/* 16 powers of 2, by their exponents plus 128. */
ALWAYS floats load_powers(const uint8_t *from) {
    __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)from)), one = _mm512_set1_epi32(1);
    __m512i subnormal = _mm512_slli_epi32(_mm512_add_epi32(e, one), 21);
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_slli_epi32(_mm512_sub_epi32(e, one), 23), subnormal));
}
/* 16 numbers of 4 bits of exponent and 3 of fraction, over 256. */
ALWAYS floats load_small_floats(const uint8_t *from) {
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)from)), 7));
}

ALWAYS bytes load_bytes(const uint8_t *from) { return _mm512_loadu_si512(from); }
ALWAYS bytes low_bits(bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
ALWAYS bytes high_bits(bytes x) { return low_bits(_mm512_srli_epi16(x, 4)); }

/* Adds to x, as bits `to` and up, the `count` bits of y from bit `at` on. */
ALWAYS bytes with_bits(bytes x, bytes y, const int at, const int count, const int to) {
    bytes moved = at < to ? _mm512_slli_epi16(y, (unsigned)(to - at)) : _mm512_srli_epi16(y, (unsigned)(at - to));
    return _mm512_ternarylogic_epi32(x, moved, _mm512_set1_epi8((char)(((1 << count) - 1) << to)), 0xF8); /* x | m & c */
}

/* A table of 16 bytes, and what it holds for bytes below 16. */
ALWAYS bytes load_table(const uint8_t *from) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)from)); }
ALWAYS bytes look_up(bytes table, bytes x) { return _mm512_shuffle_epi8(table, x); }

/* Adds to each integer the products of its 4 bytes of codes, of so many bits, with the 4 signed bytes at x. */
ALWAYS ints add_dot(ints sum, bytes codes, const uint8_t *x, const int bits) {
    (void)bits;
    int32_t four;
    memcpy(&four, x, 4);
    return _mm512_dpbusd_epi32(sum, codes, _mm512_set1_epi32(four));
}

/* Into the first level of the caches, and into the second. */
ALWAYS void prefetch(const uint8_t *from) { _mm_prefetch((const char *)from, _MM_HINT_T0); }
ALWAYS void prefetch_later(const uint8_t *from) { _mm_prefetch((const char *)from, _MM_HINT_T1); }

/* 16 rows of 16 numbers, `stride` apart, to columns `step` apart. */
ALWAYS void transpose(const float *from, int64_t stride, float *to, int64_t step) {
    __m512i r[16], t[16];
    #pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(from + i * stride);
    #pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    #pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]), r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    #pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88), t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    #pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        _mm512_storeu_si512(to + i * step, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
        _mm512_storeu_si512(to + (i + 8) * step, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
    }
}
