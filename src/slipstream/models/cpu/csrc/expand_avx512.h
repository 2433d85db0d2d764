/* What both variants of AVX-512 share: expanding weights of 12 bits. */
#pragma once

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
