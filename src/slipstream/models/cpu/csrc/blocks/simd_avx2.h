/* AVX2 with FMA and F16C, and 256-bit VNNI if the processor has it: each vector is two registers. */
#pragma once

#ifdef __AVXVNNI__
enum { SUBTRACTS_128 = 0 }; /* whether `add_dot` subtracts 128 from codes of 8 bits */
#else
enum { SUBTRACTS_128 = 1 };
#endif

#include <immintrin.h>

typedef struct { __m256 a, b; } floats;
typedef struct { __m256i a, b; } ints;
typedef struct { __m256i a, b; } bytes;

/* Makes the compiler compute x now: if it put off many such vectors, they would take more registers than there are. */
#define SETTLED(x) __asm__ volatile("" : "+x"((x).a), "+x"((x).b))

#define FLOATS(one, other) ((floats){one, other})
#define INTS(one, other) ((ints){one, other})
#define BYTES(one, other) ((bytes){one, other})

ALWAYS floats load_floats(const float *from) { return FLOATS(_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)); }
ALWAYS void store_floats(float *to, floats x) { _mm256_storeu_ps(to, x.a), _mm256_storeu_ps(to + 8, x.b); }
ALWAYS floats all_floats(float x) { return FLOATS(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
ALWAYS floats add_floats(floats x, floats y) { return FLOATS(_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)); }
ALWAYS floats subtract_floats(floats x, floats y) { return FLOATS(_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)); }
ALWAYS floats multiply_floats(floats x, floats y) { return FLOATS(_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)); }
ALWAYS floats divide_floats(floats x, floats y) { return FLOATS(_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)); }
ALWAYS floats max_floats(floats x, floats y) { return FLOATS(_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)); }
ALWAYS floats min_floats(floats x, floats y) { return FLOATS(_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)); }
/* Of all numbers of both; NaN if one is NaN. Without the sign, bits have the order of the numbers. */
ALWAYS float largest_magnitude(floats x, floats y) {
    __m256i sign = _mm256_set1_epi32(0x7fffffff), most = _mm256_setzero_si256();
    __m256 all[4] = {x.a, x.b, y.a, y.b};
    for (int i = 0; i < 4; i++) most = _mm256_max_epi32(most, _mm256_and_si256(sign, _mm256_castps_si256(all[i])));
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    int32_t bits = _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
ALWAYS floats add_product(floats sum, floats x, floats y) {
    return FLOATS(_mm256_fmadd_ps(x.a, y.a, sum.a), _mm256_fmadd_ps(x.b, y.b, sum.b));
}
ALWAYS floats take_product(floats sum, floats x, floats y) {
    return FLOATS(_mm256_fnmadd_ps(x.a, y.a, sum.a), _mm256_fnmadd_ps(x.b, y.b, sum.b));
}

/* x where first <= lane <= last, else y. */
ALWAYS __m256 only_eight(__m256 x, __m256i lane, int first, int last, __m256 y) {
    __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane);
    __m256i out = _mm256_or_si256(before, _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(last)));
    return _mm256_blendv_ps(x, y, _mm256_castsi256_ps(out));
}
ALWAYS floats only_lanes(floats x, int first, int last, floats y) {
    __m256i lane = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    return FLOATS(only_eight(x.a, lane, first, last, y.a), only_eight(x.b, lane, first - 8, last - 8, y.b));
}
ALWAYS floats nearest(floats x) {
    return FLOATS(_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                  _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
ALWAYS float largest(floats x) {
    __m256 eight = _mm256_max_ps(x.a, x.b);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
ALWAYS float sum_of(floats x) {
    __m256 eight = _mm256_add_ps(x.a, x.b);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
ALWAYS __m256 eight_powers(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
ALWAYS floats power_of_two(floats n) { return FLOATS(eight_powers(n.a), eight_powers(n.b)); }

ALWAYS ints all_ints(int32_t x) { return INTS(_mm256_set1_epi32(x), _mm256_set1_epi32(x)); }
ALWAYS ints to_ints(floats x) { return INTS(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)); }
ALWAYS floats to_floats(ints x) { return FLOATS(_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)); }
ALWAYS ints add_ints(ints x, ints y) { return INTS(_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)); }
ALWAYS ints subtract_ints(ints x, ints y) { return INTS(_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)); }
ALWAYS ints over_128(ints x) { return INTS(_mm256_srai_epi32(x.a, 7), _mm256_srai_epi32(x.b, 7)); }
ALWAYS ints times_128(ints x) { return INTS(_mm256_slli_epi32(x.a, 7), _mm256_slli_epi32(x.b, 7)); }
ALWAYS int32_t int_sum(ints x) {
    __m256i eight = _mm256_add_epi32(x.a, x.b);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
/* Of integers from -128 to 127. */
ALWAYS void store_narrow(uint8_t *to, ints x) {
    __m256i mixed = _mm256_packs_epi32(x.a, x.b), whole = _mm256_permute4x64_epi64(mixed, 0xd8);
    _mm_storeu_si128((void *)to, _mm_packs_epi16(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1)));
}

/* 16 float16 numbers, bytes and signed bytes. */
ALWAYS floats load_halves(const uint8_t *from) {
    return FLOATS(_mm256_cvtph_ps(_mm_loadu_si128((const void *)from)),
                  _mm256_cvtph_ps(_mm_loadu_si128((const void *)(from + 16))));
}
ALWAYS void store_rounded_halves(uint16_t *to, floats x) {
    _mm_storeu_si128((void *)to, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((void *)(to + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
ALWAYS floats load_unsigned(const uint8_t *from) {
    return FLOATS(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)from))),
                  _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)(from + 8)))));
}
ALWAYS floats load_signed(const uint8_t *from) {
    return FLOATS(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)from))),
                  _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)(from + 8)))));
}
/* 16 powers of 2, by their exponents plus 128. */
ALWAYS __m256 eight_exponents(const uint8_t *from) {
    __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)from)), one = _mm256_set1_epi32(1);
    __m256i subnormal = _mm256_slli_epi32(_mm256_add_epi32(e, one), 21);
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_slli_epi32(_mm256_sub_epi32(e, one), 23), subnormal));
}
ALWAYS floats load_powers(const uint8_t *from) { return FLOATS(eight_exponents(from), eight_exponents(from + 8)); }
/* 16 numbers of 4 bits of exponent and 3 of fraction, over 256. */
ALWAYS floats load_small_floats(const uint8_t *from) {
    __m256i halves = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)from)), 7);
    return FLOATS(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
}

ALWAYS bytes load_bytes(const uint8_t *from) {
    return BYTES(_mm256_loadu_si256((const void *)from), _mm256_loadu_si256((const void *)(from + 32)));
}
ALWAYS bytes low_bits(bytes x) {
    __m256i four = _mm256_set1_epi8(15);
    return BYTES(_mm256_and_si256(x.a, four), _mm256_and_si256(x.b, four));
}
ALWAYS bytes high_bits(bytes x) { return low_bits(BYTES(_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4))); }

/* Adds to x, as bits `to` and up, the `count` bits of y from bit `at` on. */
ALWAYS __m256i with_some_bits(__m256i x, __m256i y, const int at, const int count, const int to) {
    __m256i moved = at < to ? _mm256_slli_epi16(y, to - at) : _mm256_srli_epi16(y, at - to);
    return _mm256_or_si256(x, _mm256_and_si256(moved, _mm256_set1_epi8((char)(((1 << count) - 1) << to))));
}
ALWAYS bytes with_bits(bytes x, bytes y, const int at, const int count, const int to) {
    return BYTES(with_some_bits(x.a, y.a, at, count, to), with_some_bits(x.b, y.b, at, count, to));
}

/* A table of 16 bytes, and what it holds for bytes below 16. */
ALWAYS bytes load_table(const uint8_t *from) {
    __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)from));
    return BYTES(twice, twice);
}
ALWAYS bytes look_up(bytes table, bytes x) {
    return BYTES(_mm256_shuffle_epi8(table.a, x.a), _mm256_shuffle_epi8(table.b, x.b));
}

ALWAYS __m256i four_at(const uint8_t *x) {
    int32_t all;
    memcpy(&all, x, 4);
    return _mm256_set1_epi32(all);
}

#ifdef __AVXVNNI__
/* Adds to each integer the products of its 4 bytes of codes, of so many bits, with the 4 signed bytes at x. */
ALWAYS ints add_dot(ints sum, bytes codes, const uint8_t *x, const int bits) {
    (void)bits;
    __m256i four = four_at(x);
    return INTS(_mm256_dpbusd_avx_epi32(sum.a, codes.a, four), _mm256_dpbusd_avx_epi32(sum.b, codes.b, four));
}
#else
/* Sums of two products in 16 bits. Codes of 8 bits, less 128, would be too large if their signs did not move to the
 * other factor. */
ALWAYS __m256i two_products(__m256i codes, __m256i four, const int bits) {
    if (bits < 8) return _mm256_maddubs_epi16(codes, four);
    codes = _mm256_xor_si256(codes, _mm256_set1_epi8((char)0x80));
    return _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(four, codes));
}

/* 16 bits have room for sums of sixteen products of codes of 4 bits, of eight of 5 bits, four of 6 and two of 8. */
#define SUMS_IN_16_BITS
ALWAYS ints add_in_16_bits(ints x, ints y) { return INTS(_mm256_add_epi16(x.a, y.a), _mm256_add_epi16(x.b, y.b)); }
ALWAYS ints in_32_bits(ints x) { /* sums of two neighbors */
    __m256i one = _mm256_set1_epi16(1);
    return INTS(_mm256_madd_epi16(x.a, one), _mm256_madd_epi16(x.b, one));
}

ALWAYS ints products_in_16_bits(bytes codes, const uint8_t *x, const int bits) {
    __m256i four = four_at(x);
    return INTS(two_products(codes.a, four, bits), two_products(codes.b, four, bits));
}
/* Sums of the products of four vectors of codes of 4 or 5 bits with the activations `at` bytes behind each x. */
ALWAYS ints four_in_16_bits(const bytes codes[4], const uint8_t *const x[4], int at) {
    ints sums[2];
    #pragma GCC unroll 2
    for (int k = 0; k < 4; k += 2) {
        ints one = products_in_16_bits(codes[k], x[k] + at, 4), two = products_in_16_bits(codes[k + 1], x[k + 1] + at, 4);
        sums[k / 2] = add_in_16_bits(one, two);
        SETTLED(sums[k / 2]);
    }
    return add_in_16_bits(sums[0], sums[1]);
}
/* The same as integers, of any codes. */
ALWAYS ints four_dots(const bytes codes[4], const uint8_t *const x[4], int at, const int bits) {
    if (bits < 6) return in_32_bits(four_in_16_bits(codes, x, at));
    ints sum = all_ints(0);
    #pragma GCC unroll 2
    for (int k = 0; k < 4; k += 2) {
        ints one = products_in_16_bits(codes[k], x[k] + at, bits), two = products_in_16_bits(codes[k + 1], x[k + 1] + at, bits);
        sum = add_ints(sum, bits == 6 ? in_32_bits(add_in_16_bits(one, two)) : add_ints(in_32_bits(one), in_32_bits(two)));
        SETTLED(sum);
    }
    return sum;
}
#endif

/* Into the first level of the caches, and into the second. */
ALWAYS void prefetch(const uint8_t *from) { _mm_prefetch((const char *)from, _MM_HINT_T0); }
ALWAYS void prefetch_later(const uint8_t *from) { _mm_prefetch((const char *)from, _MM_HINT_T1); }

/* 8 rows of 8 numbers, `stride` apart, to columns `step` apart. */
ALWAYS void transpose_eight(const float *from, int64_t stride, float *to, int64_t step) {
    __m256 rows[8], pairs[8], fours[8];
    for (int i = 0; i < 8; i++) rows[i] = _mm256_loadu_ps(from + i * stride);
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
            fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * step, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * step, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31));
    }
}
/* 16 rows of 16 numbers, `stride` apart, to columns `step` apart. */
ALWAYS void transpose(const float *from, int64_t stride, float *to, int64_t step) {
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 16; j += 8) transpose_eight(from + i * stride + j, stride, to + j * step + i, step);
}
