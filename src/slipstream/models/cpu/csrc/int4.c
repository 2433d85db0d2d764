/* Products of weights rounded to 4 bits, for few tokens: weight = code * scale + offset, per 32 inputs of an output.
 *
 * The codes of a group are multiplied as the numbers 128 to 143, whose bfloat16 form is 0x4300 + code, and its sum is
 * scaled once: sum of x * weight = scale * (sum of x * (128 + code) - 128 * sum of x) + offset * sum of x.
 *
 * One or two tokens are summed in two chains, more in one, so bits depend on how many there are; a draft's may.
 *
 * Layout: data [panels][groups][640] bytes: 8 quads of 64 bytes, then 32 scales and 32 offsets. Word o * 2 + i
 * of a quad has 4 codes: bits 4 * (pair * 2 + side) belong to output side * 16 + o and input pair * 2 + i.
 */
#include "kernels.h"

#include <omp.h>
#include <string.h>

enum {
    SOME = 6,       /* tokens multiplied at a time */
    AHEAD = 2560    /* bytes prefetched */
};

/* Adds one panel's group to the sums of some tokens. totals: the sum of each token's inputs in the group. */
static inline __attribute__((always_inline)) void add_group(const int rows, const uint8_t *record, const uint16_t *x,
                                                            long stride, const float *totals, long groups,
                                                            __m512 sum[SOME][2]) {
    __m512i one_code = _mm512_set1_epi16(0x000f), above = _mm512_set1_epi16(0x4300);
    __m512 part[SOME][2][2];
    #pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
        part[i][0][0] = part[i][0][1] = part[i][1][0] = part[i][1][1] = _mm512_setzero_ps();
    for (int quad = 0; quad < GROUP / 4; quad++) {
        __m512i codes = _mm512_loadu_si512(record + quad * 64);
        _mm_prefetch((const char *)record + quad * 80 + AHEAD, _MM_HINT_T0);
        #pragma GCC unroll 2
        for (int pair = 0; pair < 2; pair++) {
            __m512i l = pair ? _mm512_srli_epi16(codes, 8) : codes, r = _mm512_srli_epi16(codes, pair ? 12 : 4);
            __m512bh left = (__m512bh)_mm512_ternarylogic_epi32(l, one_code, above, 0xEA); /* l & one_code | above */
            __m512bh right = (__m512bh)_mm512_ternarylogic_epi32(r, one_code, above, 0xEA);
            const int chain = rows > 2 ? 0 : pair; /* few tokens: more sums, so that none waits for the one before */
            #pragma GCC unroll 6
            for (int i = 0; i < rows; i++) {
                int both;
                memcpy(&both, x + i * stride + quad * 4 + pair * 2, sizeof both);
                __m512bh input = (__m512bh)_mm512_set1_epi32(both);
                part[i][chain][0] = _mm512_dpbf16_ps(part[i][chain][0], input, left);
                part[i][chain][1] = _mm512_dpbf16_ps(part[i][chain][1], input, right);
            }
        }
    }
    _mm_prefetch((const char *)record + 576 + AHEAD, _MM_HINT_T0);
    #pragma GCC unroll 2
    for (int side = 0; side < 2; side++) {
        __m512 scale = to_float(_mm256_loadu_si256((const void *)(record + 512 + side * 32)));
        __m512 offset = to_float(_mm256_loadu_si256((const void *)(record + 576 + side * 32)));
        #pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            __m512 whole = rows > 2 ? part[i][0][side] : _mm512_add_ps(part[i][0][side], part[i][1][side]);
            __m512 total = _mm512_set1_ps(totals[i * groups]);
            whole = _mm512_fnmadd_ps(total, _mm512_set1_ps(128), whole);
            sum[i][side] = _mm512_fmadd_ps(whole, scale, sum[i][side]);
            sum[i][side] = _mm512_fmadd_ps(total, offset, sum[i][side]);
        }
    }
}

/* One panel for some tokens. x: [rows][inputs]; totals: [rows][groups]; sums: [rows][PANEL]. */
static inline __attribute__((always_inline)) void add_panel(const int rows, const struct linear *w, long panel,
                                                            const uint16_t *x, const float *totals, float *sums) {
    long groups = w->inputs / GROUP;
    const uint8_t *record = w->data + panel * groups * RECORD;
    __m512 sum[SOME][2];
    #pragma GCC unroll 6
    for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    for (long g = 0; g < groups; g++)
        add_group(rows, record + g * RECORD, x + g * GROUP, w->inputs, totals + g, groups, sum);
    #pragma GCC unroll 6
    for (int i = 0; i < rows; i++) {
        _mm512_store_ps(sums + i * PANEL, sum[i][0]);
        _mm512_store_ps(sums + i * PANEL + 16, sum[i][1]);
    }
}

static float total_of(const uint16_t *x) {
    __m512 left = to_float(_mm256_loadu_si256((const void *)x));
    return _mm512_reduce_add_ps(_mm512_add_ps(left, to_float(_mm256_loadu_si256((const void *)(x + 16)))));
}

#define ROWS_CASE(rows) case rows: add_panel(rows, w, panel, from, totals + done * groups, sums); break

/* As `multiply`; space: [tokens][groups] floats. */
void multiply_int4(const struct linear *w, const uint16_t *x, long tokens, uint16_t *out, uint16_t *space) {
    long panels = (w->outputs + PANEL - 1) / PANEL, groups = w->inputs / GROUP;
    float *totals = (float *)space;
    for (long i = 0; i < tokens * groups; i++) totals[i] = total_of(x + i * GROUP);
    #pragma omp parallel
    {
        _Alignas(64) float sums[SOME * PANEL];
        long threads = omp_get_num_threads(), thread = omp_get_thread_num();
        for (long panel = panels * thread / threads; panel < panels * (thread + 1) / threads; panel++)
            for (long done = 0; done < tokens; done += SOME) {
                long rows = min_long(SOME, tokens - done);
                const uint16_t *from = x + done * w->inputs;
                switch (rows) {
                    ROWS_CASE(1); ROWS_CASE(2); ROWS_CASE(3); ROWS_CASE(4); ROWS_CASE(5); ROWS_CASE(6);
                }
                store_with_bias(w, sums, rows, panel, out + done * w->outputs);
            }
    }
}
