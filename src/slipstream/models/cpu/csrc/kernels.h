/* What the kernels share. */
#pragma once

#include <immintrin.h>

#include "structs.h"

/* out [tokens][outputs] = x [tokens][inputs] times the weights, plus the bias. space: as many numbers as tokens times
 * the inputs, rounded up to a multiple of 128. */
void multiply(const struct linear *w, const uint16_t *x, long tokens, uint16_t *out, uint16_t *space);
void multiply_int4(const struct linear *w, const uint16_t *x, long tokens, uint16_t *out, uint16_t *space);

static inline long min_long(long a, long b) { return a < b ? a : b; }

static inline __m512 to_float(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* Sums [rows][PANEL] of a panel and the bias, rounded once. */
static inline void store_with_bias(const struct linear *w, const float *sums, long rows, long panel, uint16_t *out) {
    long first = panel * PANEL;
    __mmask32 there = (__mmask32)(w->outputs - first >= PANEL ? ~0u : (1u << (w->outputs - first)) - 1);
    __m512 left = _mm512_setzero_ps(), right = left;
    if (w->bias) {
        __m512i both = _mm512_maskz_loadu_epi16(there, w->bias + first);
        left = to_float(_mm512_castsi512_si256(both));
        right = to_float(_mm512_extracti64x4_epi64(both, 1));
    }
    for (long i = 0; i < rows; i++) {
        __m512 a = _mm512_add_ps(_mm512_load_ps(sums + i * PANEL), left);
        __m512 b = _mm512_add_ps(_mm512_load_ps(sums + i * PANEL + 16), right);
        _mm512_mask_storeu_epi16(out + i * w->outputs + first, there, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
}

static inline __m512 load(const uint16_t *from) { return to_float(_mm256_loadu_si256((const void *)from)); }
static inline __m256i to_bf16(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
static inline void store(uint16_t *to, __m512 x) { _mm256_storeu_si256((void *)to, to_bf16(x)); }
static inline __m512 round_bf16(__m512 x) { return to_float(to_bf16(x)); }

/* e to the x, for x from -88 to 88: 2^n times a polynomial of degree 6, within 2 units of the last place. */
static inline __m512 exponential(__m512 x) {
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 y = _mm512_set1_ps(1.0f / 720);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 120));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 24));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 6));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.5f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, n);
}

/* Transposes 16 rows of 16 words. */
static inline __attribute__((always_inline)) void transpose_16x16(__m512i r[16]) {
    __m512i t[16];
    #pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
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
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

void attend(const struct layer *layer, const struct kv_cache *m, const uint16_t *heads, long tokens, uint16_t *out,
            int64_t *groups);
