/* AVX2: numbers are widened to float32. */
#pragma once

ALWAYS __m256 eight_wide(const uint16_t *from) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
ALWAYS floats load_bf16(const uint16_t *from) { return FLOATS(eight_wide(from), eight_wide(from + 8)); }

/* To the nearest, ties to even; what is no number stays none. */
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
