/* What the kernels share. Numbers of type uint16_t are bfloat16. */
#pragma once

#include <immintrin.h>
#include <stdint.h>

enum { PANEL = 32 }; /* outputs computed together */

/* A linear layer as compressed.c keeps it (12 bits) or rounded.c (4 bits: data only). bias: [outputs] or NULL. */
struct linear {
    long bits, inputs, outputs;
    const uint8_t *data, *tables;
    const int32_t *offsets;
    const uint32_t *exceptions;
    const uint16_t *bias;
};

/* out [tokens][outputs] = x [tokens][inputs] times the weights, plus the bias. space: as many numbers as tokens times
 * the inputs, rounded up to a multiple of 128. */
void multiply(const struct linear *w, const uint16_t *x, long tokens, uint16_t *out, uint16_t *space);
void multiply_rounded(const struct linear *w, const uint16_t *x, long tokens, uint16_t *out, uint16_t *space);

static inline long least(long a, long b) { return a < b ? a : b; }

static inline __m512 widened(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* Sums [rows][PANEL] of a panel and the bias, rounded once. */
static inline void finish(const struct linear *w, const float *sums, long rows, long panel, uint16_t *out) {
    long first = panel * PANEL;
    __mmask32 there = (__mmask32)(w->outputs - first >= PANEL ? ~0u : (1u << (w->outputs - first)) - 1);
    __m512 left = _mm512_setzero_ps(), right = left;
    if (w->bias) {
        __m512i both = _mm512_maskz_loadu_epi16(there, w->bias + first);
        left = widened(_mm512_castsi512_si256(both));
        right = widened(_mm512_extracti64x4_epi64(both, 1));
    }
    for (long i = 0; i < rows; i++) {
        __m512 a = _mm512_add_ps(_mm512_load_ps(sums + i * PANEL), left);
        __m512 b = _mm512_add_ps(_mm512_load_ps(sums + i * PANEL + 16), right);
        _mm512_mask_storeu_epi16(out + i * w->outputs + first, there, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
}
