/* What the kernels share. Numbers of type uint16_t are bfloat16. */
#pragma once

#include <immintrin.h>
#include <stdint.h>

/* A linear layer as compressed.c keeps it. bias: [outputs] or NULL. */
struct linear {
    long inputs, outputs;
    const uint8_t *data, *tables;
    const int32_t *offsets;
    const uint32_t *exceptions;
    const uint16_t *bias;
};

void multiply(const struct linear *w, const uint16_t *x, long tokens, uint16_t *out, uint16_t *space);

static inline long least(long a, long b) { return a < b ? a : b; }

static inline __m512 widened(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
