/* What the kernels share. Numbers of type uint16_t are bfloat16. */
#pragma once

#include <immintrin.h>
#include <stdint.h>

enum {
    LANES = 16,   /* numbers in a register */
    PANEL = 32,   /* outputs computed together */
    BLOCK = 128,  /* inputs of a panel unfolded at a time: 8 KB */
    QUAD = 192    /* bytes of 4 inputs of a panel */
};

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

static inline __m512 load(const uint16_t *from) { return widened(_mm256_loadu_si256((const void *)from)); }
static inline __m256i narrowed(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
static inline void store(uint16_t *to, __m512 x) { _mm256_storeu_si256((void *)to, narrowed(x)); }
static inline __m512 rounded(__m512 x) { return widened(narrowed(x)); }

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

/* Root mean square norm. weight: [size], NULL where there is no norm. rounds_first: before the weight, not behind. */
struct norm {
    const float *weight;
    float eps;
    int rounds_first;
};

/* heads: of queries; behind theirs come key_heads each of keys and values. The gate's activation is
 * x / (1 + exp(-(slope * x + cubic * x^3))): SiLU, or GELU by its tanh formula. */
struct layer {
    struct linear qkv, out, gate_up, down;
    struct norm before_attention, queries, keys, after_attention, before_feed_forward, after_feed_forward;
    long hidden, inner, heads, key_heads, size;
    float slope, cubic;
};

/* Keys and values [slots][key_heads][length][size] of a layer, and where its new tokens stand in them. */
struct memory {
    uint16_t *keys, *values;
    long length, window; /* window: positions a token sees, itself included; 0 for all */
    float scaling;
    const int64_t *slots, *positions;
};

void attend(const struct layer *layer, const struct memory *m, const uint16_t *heads, long tokens, uint16_t *out,
            int64_t *groups);
