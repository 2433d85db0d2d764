/* AVX-512 without bfloat16: numbers are widened to float32. */
#pragma once

ALWAYS __m512 upper_half(__m512i bits) { return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)); }
ALWAYS floats load_bf16(const uint16_t *from) {
    return upper_half(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from)));
}

/* To the nearest, ties to even; what is no number stays none. */
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
