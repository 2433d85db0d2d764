/* bfloat16 numbers over the vectors of blocks/simd.h, by the best instructions that the compiler may use.
 *
 * AVX-512 with bfloat16 multiplies pairs of numbers and rounds as its instruction does; all other variants widen
 * numbers to float32. The two give different bits, but each gives a token the same bits, however many tokens are beside
 * it.
 */
#pragma once

#include "blocks/simd.h"
#include "structs.h"

/* `multiply` of kernels.h by a layer in blocks, whose format has codes; see blocks/products.c. */
void multiply_blocks_bf16(const struct linear *w, const uint16_t *x, int64_t tokens, uint16_t *out, uint8_t *space);

#if defined(__AVX512VNNI__)
ALWAYS __m512 upper_half(__m512i bits) { return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)); }
ALWAYS floats load_bf16(const uint16_t *from) {
    return upper_half(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from)));
}

/* 64 weights of 12 bits: a byte of sign and mantissa and a code each, which the table turns into an exponent. */
ALWAYS void join_exponents(bytes data, bytes codes, const uint8_t *table, uint16_t *to) {
    __m512i upper = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)table));
    __m512i lowest = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)(table + 16)));
    __m512i sign = _mm512_set1_epi8((char)0x80);
    upper = _mm512_ternarylogic_epi32(data, sign, _mm512_shuffle_epi8(upper, codes), 0xEA);   /* data & sign | */
    lowest = _mm512_ternarylogic_epi32(data, sign, _mm512_shuffle_epi8(lowest, codes), 0xBA); /* data & ~sign | */
    _mm512_store_si512(to, _mm512_unpacklo_epi8(lowest, upper));
    _mm512_store_si512(to + 32, _mm512_unpackhi_epi8(lowest, upper));
}

#if defined(__AVX512BF16__)
ALWAYS void store_bf16(uint16_t *to, floats x) { _mm256_storeu_si256((void *)to, (__m256i)_mm512_cvtneps_pbh(x)); }

/* Two numbers, to be multiplied with all pairs. */
ALWAYS __m512bh pair_at(const uint16_t *from) {
    int both;
    memcpy(&both, from, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
}

/* 16 rows of 16 words, `stride` numbers apart, to columns `step` words apart. */
ALWAYS void transpose_words(const uint16_t *from, int64_t stride, uint32_t *to, int64_t step) {
    transpose((const float *)(const void *)from, stride / 2, (float *)(void *)to, step);
}

#else /* this variant and all that follow widen numbers to float32 */
/* To the nearest, ties to even; NaN stays NaN. */
ALWAYS void store_bf16(uint16_t *to, floats x) {
    __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    rounded = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), rounded, quiet);
    _mm256_storeu_si256((void *)to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

/* The first and the second numbers of 16 pairs. */
ALWAYS floats load_first_of_pairs(const uint16_t *from) { return upper_half(_mm512_loadu_si512(from)); }
ALWAYS floats load_second_of_pairs(const uint16_t *from) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(from), _mm512_set1_epi32((int)0xffff0000)));
}
#endif

#elif defined(__AVX2__)
ALWAYS __m256 eight_wide(const uint16_t *from) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
ALWAYS floats load_bf16(const uint16_t *from) { return FLOATS(eight_wide(from), eight_wide(from + 8)); }

/* To the nearest, ties to even; NaN stays NaN. */
ALWAYS __m256i eight_rounded(__m256 x) {
    __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i none = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, none), 16);
}
ALWAYS void store_bf16(uint16_t *to, floats x) {
    __m256i mixed = _mm256_packus_epi32(eight_rounded(x.a), eight_rounded(x.b));
    _mm256_storeu_si256((void *)to, _mm256_permute4x64_epi64(mixed, 0xd8));
}

/* The first and the second numbers of 16 pairs. */
ALWAYS floats load_first_of_pairs(const uint16_t *from) {
    __m256i a = _mm256_loadu_si256((const void *)from), b = _mm256_loadu_si256((const void *)(from + 16));
    return FLOATS(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)));
}
ALWAYS floats load_second_of_pairs(const uint16_t *from) {
    __m256i a = _mm256_loadu_si256((const void *)from), b = _mm256_loadu_si256((const void *)(from + 16));
    __m256i upper = _mm256_set1_epi32((int)0xffff0000);
    return FLOATS(_mm256_castsi256_ps(_mm256_and_si256(a, upper)), _mm256_castsi256_ps(_mm256_and_si256(b, upper)));
}

/* 64 weights of 12 bits: a byte of sign and mantissa and a code each, which the table turns into an exponent. */
ALWAYS void join_half(__m256i data, __m256i codes, const uint8_t *table, uint16_t *to) {
    __m256i upper = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)table));
    __m256i lowest = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)(table + 16)));
    __m256i sign = _mm256_set1_epi8((char)0x80);
    upper = _mm256_or_si256(_mm256_and_si256(data, sign), _mm256_shuffle_epi8(upper, codes));
    lowest = _mm256_or_si256(_mm256_andnot_si256(sign, data), _mm256_shuffle_epi8(lowest, codes));
    _mm256_store_si256((void *)to, _mm256_unpacklo_epi8(lowest, upper));
    _mm256_store_si256((void *)(to + 32), _mm256_unpackhi_epi8(lowest, upper));
}
ALWAYS void join_exponents(bytes data, bytes codes, const uint8_t *table, uint16_t *to) {
    join_half(data.a, codes.a, table, to);
    join_half(data.b, codes.b, table, to + 16);
}

#elif defined(__ARM_FEATURE_DOTPROD)
ALWAYS floats load_bf16(const uint16_t *from) {
    floats y;
    EACH y.val[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from + 4 * i), 16));
    return y;
}

/* To the nearest, ties to even; NaN stays NaN. */
ALWAYS void store_bf16(uint16_t *to, floats x) {
    EACH {
        uint32x4_t bits = vreinterpretq_u32_f32(x.val[i]), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
        uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000)), is_number = vceqq_f32(x.val[i], x.val[i]);
        vst1_u16(to + 4 * i, vshrn_n_u32(vbslq_u32(is_number, rounded, quiet), 16));
    }
}

/* The first and the second numbers of 16 pairs. */
ALWAYS floats load_first_of_pairs(const uint16_t *from) {
    floats y;
    EACH y.val[i] = vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u16(vld1q_u16(from + 8 * i)), 16));
    return y;
}
ALWAYS floats load_second_of_pairs(const uint16_t *from) {
    floats y;
    EACH {
        uint32x4_t both = vreinterpretq_u32_u16(vld1q_u16(from + 8 * i));
        y.val[i] = vreinterpretq_f32_u32(vandq_u32(both, vdupq_n_u32(0xffff0000)));
    }
    return y;
}

/* 64 weights of 12 bits: a byte of sign and mantissa and a code each, which the table turns into an exponent. */
ALWAYS void join_exponents(bytes data, bytes codes, const uint8_t *table, uint16_t *to) {
    uint8x16_t uppers = vld1q_u8(table), lowests = vld1q_u8(table + 16), sign = vdupq_n_u8(0x80);
    EACH {
        uint8x16_t upper = vorrq_u8(vandq_u8(data.val[i], sign), vqtbl1q_u8(uppers, codes.val[i]));
        uint8x16_t lowest = vorrq_u8(vbicq_u8(data.val[i], sign), vqtbl1q_u8(lowests, codes.val[i]));
        vst1q_u8((uint8_t *)(to + 8 * i), vzip1q_u8(lowest, upper));
        vst1q_u8((uint8_t *)(to + 32 + 8 * i), vzip2q_u8(lowest, upper));
    }
}

#else /* plain C: gives the bits of all variants that widen numbers */
ALWAYS float bf16_to_float(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
ALWAYS floats load_bf16(const uint16_t *from) { floats y; EACH y.v[i] = bf16_to_float(from[i]); return y; }

/* To the nearest, ties to even; NaN stays NaN. */
ALWAYS void store_bf16(uint16_t *to, floats x) {
    EACH {
        uint32_t bits;
        memcpy(&bits, &x.v[i], 4);
        bits = x.v[i] == x.v[i] ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000;
        to[i] = (uint16_t)(bits >> 16);
    }
}

/* The first and the second numbers of 16 pairs. */
ALWAYS floats load_first_of_pairs(const uint16_t *from) { floats y; EACH y.v[i] = bf16_to_float(from[2 * i]); return y; }
ALWAYS floats load_second_of_pairs(const uint16_t *from) { floats y; EACH y.v[i] = bf16_to_float(from[2 * i + 1]); return y; }

/* 64 weights of 12 bits: a byte of sign and mantissa and a code each, which the table turns into an exponent. */
ALWAYS void join_exponents(bytes data, bytes codes, const uint8_t *table, uint16_t *to) {
    for (int i = 0; i < 64; i++) {
        int lane = i / 16, within = i % 16, place = within / 8 * 32 + lane * 8 + within % 8, code = codes.v[i];
        uint8_t upper = (data.v[i] & 0x80) | table[code], lowest = (data.v[i] & 0x7f) | table[16 + code];
        to[place] = (uint16_t)(upper << 8 | lowest);
    }
}
#endif

ALWAYS floats round_bf16(floats x) {
    uint16_t rounded[16];
    store_bf16(rounded, x);
    return load_bf16(rounded);
}
