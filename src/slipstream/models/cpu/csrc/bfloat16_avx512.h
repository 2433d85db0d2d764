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
