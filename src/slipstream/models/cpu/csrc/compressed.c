/* Products with bfloat16 weights that take 12 bits each, without loss.
 *
 * The 8 exponent bits of a weight carry little: in a panel of 32 outputs nearly all are among 15 neighbouring values.
 * A weight is stored as a byte of sign and mantissa and a 4-bit code that counts down from the panel's largest
 * exponent; the few out of its reach are exceptions, stored whole and restored when a block is expanded. A forward of
 * few tokens waits for its weights, so a quarter less of them is a quarter less time; they are prefetched.
 *
 * A sum runs over the inputs in order, whatever the number of tokens: a token gets the same bits alone and beside
 * others. compression.c says how the weights are laid out.
 */
#include "kernels.h"

#include <omp.h>
#include <string.h>

enum {
    ROWS = 12,     /* tokens whose sums are in registers */
    BESIDE_MOST = 10, BESIDE_MANY = 8, /* of them while the next block is expanded: if that is all of them, and if not */
    CHUNK = 248,   /* tokens whose sums are accumulated while a panel is read */
    AHEAD = 6144   /* bytes prefetched */
};

/* A block to expand, a quad at a time. */
struct compressed_block {
    const uint8_t *data, *table;
    int quads;
    uint16_t *to; /* [pairs][2][16 outputs x 2 inputs] */
};

static inline __attribute__((always_inline)) void expand_pair(__m512i bytes, __m512i codes, const uint8_t *table,
                                                              uint16_t *to) {
    __m512i upper = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)table));
    __m512i lowest = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)(table + 16)));
    __m512i sign = _mm512_set1_epi8((char)0x80);
    upper = _mm512_ternarylogic_epi32(bytes, sign, _mm512_shuffle_epi8(upper, codes), 0xEA);   /* bytes & sign | */
    lowest = _mm512_ternarylogic_epi32(bytes, sign, _mm512_shuffle_epi8(lowest, codes), 0xBA); /* bytes & ~sign | */
    _mm512_store_si512(to, _mm512_unpacklo_epi8(lowest, upper));
    _mm512_store_si512(to + 32, _mm512_unpackhi_epi8(lowest, upper));
}

static inline __attribute__((always_inline)) void expand_quad(const struct compressed_block *of, int quad) {
    const uint8_t *data = of->data + quad * QUAD;
    _mm_prefetch((const char *)data + AHEAD, _MM_HINT_T1);
    _mm_prefetch((const char *)data + AHEAD + 64, _MM_HINT_T1);
    _mm_prefetch((const char *)data + AHEAD + 128, _MM_HINT_T1);
    __m512i codes = _mm512_loadu_si512(data + 128), half = _mm512_set1_epi8(0x0f);
    expand_pair(_mm512_loadu_si512(data), _mm512_and_si512(codes, half), of->table, of->to + quad * 128);
    codes = _mm512_and_si512(_mm512_srli_epi16(codes, 4), half);
    expand_pair(_mm512_loadu_si512(data + 64), codes, of->table, of->to + quad * 128 + 64);
}

static void expand(const struct compressed_block *of, int first) {
    for (int quad = first; quad < of->quads; quad++) expand_quad(of, quad);
}

/* Some tokens' inputs [rows][BLOCK] and their sums [rows][PANEL], from 0 if a panel begins. */
struct tokens {
    const uint16_t *inputs;
    float *sums;
    int begin;
};

/* Adds a block's products to the sums. `next` is expanded meanwhile, so that neither waits. */
static inline __attribute__((always_inline)) void add(const int rows, const struct tokens *of, const uint16_t *block,
                                                      int quads, const struct compressed_block *next) {
    __m512 sum[ROWS][2];
    const uint16_t *inputs = of->inputs;
    #pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        sum[i][0] = of->begin ? _mm512_setzero_ps() : _mm512_load_ps(of->sums + i * PANEL);
        sum[i][1] = of->begin ? _mm512_setzero_ps() : _mm512_load_ps(of->sums + i * PANEL + 16);
    }
    for (int quad = 0; quad < quads; quad++) {
        if (next && quad < next->quads) expand_quad(next, quad);
        #pragma GCC unroll 2
        for (int pair = 0; pair < 2; pair++) {
            __m512bh left = (__m512bh)_mm512_load_si512(block + pair * 64);
            __m512bh right = (__m512bh)_mm512_load_si512(block + pair * 64 + 32);
            #pragma GCC unroll 12
            for (int i = 0; i < rows; i++) {
                int both;
                memcpy(&both, inputs + i * BLOCK + pair * 2, sizeof both);
                __m512bh input = (__m512bh)_mm512_set1_epi32(both);
                sum[i][0] = _mm512_dpbf16_ps(sum[i][0], input, left);
                sum[i][1] = _mm512_dpbf16_ps(sum[i][1], input, right);
            }
        }
        block += 128, inputs += 4;
    }
    #pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        _mm512_store_ps(of->sums + i * PANEL, sum[i][0]);
        _mm512_store_ps(of->sums + i * PANEL + 16, sum[i][1]);
    }
}

#define AND_EXPAND(rows) case rows: add(rows, of, block, quads, next); break
static void add_and_expand(int rows, const struct tokens *of, const uint16_t *block, int quads,
                           const struct compressed_block *next) {
    switch (rows) {
        AND_EXPAND(1); AND_EXPAND(2); AND_EXPAND(3); AND_EXPAND(4); AND_EXPAND(5); AND_EXPAND(6); AND_EXPAND(7); AND_EXPAND(8); AND_EXPAND(9); AND_EXPAND(10);
    }
    expand(next, quads);
}

#define ONLY(rows) case rows: add(rows, of, block, quads, NULL); break
static void add_only(int rows, const struct tokens *of, const uint16_t *block, int quads) {
    switch (rows) {
        ONLY(1); ONLY(2); ONLY(3); ONLY(4); ONLY(5); ONLY(6);
        ONLY(7); ONLY(8); ONLY(9); ONLY(10); ONLY(11); ONLY(12);
    }
}

static long blocks_of(const struct linear *w) { return (w->inputs + BLOCK - 1) / BLOCK; }

/* Block number `unit` of all panels, counted panel by panel. */
static struct compressed_block compressed_block(const struct linear *w, long unit, uint16_t *to) {
    long panel = unit / blocks_of(w), input = unit % blocks_of(w) * BLOCK;
    const uint8_t *data = w->data + (panel * w->inputs + input) / 4 * QUAD;
    return (struct compressed_block){data, w->tables + panel * 32, (int)min_long(BLOCK, w->inputs - input) / 4, to};
}

static void restore_exceptions(const struct linear *w, long unit, uint16_t *block) {
    for (int e = w->offsets[unit]; e < w->offsets[unit + 1]; e++)
        block[w->exceptions[e] >> 16] = (uint16_t)w->exceptions[e];
}

/* The inputs x [blocks][stride][BLOCK], of which `rows` tokens from `done` on, at most CHUNK, are multiplied. */
struct batch {
    const uint16_t *x;
    long stride, done, rows;
    uint16_t *out;
};

/* The panels from `first` to `last`. */
static void multiply_panels(const struct linear *w, long first, long last, const struct batch *of) {
    _Alignas(64) uint16_t block[2][BLOCK * PANEL];
    _Alignas(64) float sums[CHUNK * PANEL];
    long blocks = blocks_of(w), end = last * blocks, rows = of->rows, beside = rows <= BESIDE_MOST ? rows : BESIDE_MANY;
    struct compressed_block next = compressed_block(w, first * blocks, block[0]);
    expand(&next, 0);
    restore_exceptions(w, first * blocks, block[0]);
    for (long unit = first * blocks; unit < end; unit++) {
        uint16_t *now = next.to;
        int quads = next.quads, begin = unit % blocks == 0;
        next = compressed_block(w, min_long(unit + 1, end - 1), now == block[0] ? block[1] : block[0]);
        const uint16_t *x = of->x + (unit % blocks * of->stride + of->done) * BLOCK;
        struct tokens some = {x, sums, begin};
        add_and_expand((int)beside, &some, now, quads, &next);
        for (long row = beside; row < rows; row += ROWS) {
            some.inputs = x + row * BLOCK, some.sums = sums + row * PANEL;
            add_only((int)min_long(ROWS, rows - row), &some, now, quads);
        }
        restore_exceptions(w, min_long(unit + 1, end - 1), next.to);
        if ((unit + 1) % blocks == 0)
            store_with_bias(w, sums, rows, unit / blocks, of->out + of->done * w->outputs);
    }
}

/* Copies a block of a token's inputs to its place in `batch.x`. */
static void gather(const uint16_t *x, long tokens, long inputs, long token, long block, uint16_t *to) {
    long count = min_long(BLOCK, inputs - block * BLOCK);
    memcpy(to + (block * tokens + token) * BLOCK, x + token * inputs + block * BLOCK, count * sizeof *x);
}

void multiply(const struct linear *w, const uint16_t *x, long tokens, uint16_t *out, uint16_t *space) {
    if (w->bits == 4) {
        multiply_int4(w, x, tokens, out, space);
        return;
    }
    long panels = (w->outputs + PANEL - 1) / PANEL, blocks = blocks_of(w);
    #pragma omp parallel
    {
        long threads = omp_get_num_threads(), thread = omp_get_thread_num();
        long first = panels * thread / threads, last = panels * (thread + 1) / threads;
        #pragma omp for collapse(2)
        for (long block = 0; block < blocks; block++)
            for (long token = 0; token < tokens; token++) gather(x, tokens, w->inputs, token, block, space);
        for (long done = 0; done < tokens && first < last; done += CHUNK) {
            struct batch some = {space, tokens, done, min_long(CHUNK, tokens - done), out};
            multiply_panels(w, first, last, &some);
        }
    }
}
