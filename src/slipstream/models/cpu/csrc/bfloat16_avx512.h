/* AVX-512 with bfloat16. */
#pragma once

ALWAYS floats load_bf16(const uint16_t *from) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
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

/* To the second level of the caches. */
ALWAYS void prefetch_later(const uint8_t *from) { _mm_prefetch((const char *)from, _MM_HINT_T1); }
