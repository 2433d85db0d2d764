/* Products of 4-bit codes by the instruction for pairs of bfloat16 numbers, for int4.c: as the numbers 128 to 143, whose
 * bfloat16 form is 0x4300 + code. One or two tokens are summed in two chains, more in one, so bits depend on how many
 * there are; a draft's may. */

enum { SOME = 8 /* tokens multiplied at a time */, ADDED = 128 /* to every code */, PER_GROUP = GROUP };
#define EVERY_ROWS(of) of(1); of(2); of(3); of(4); of(5); of(6); of(7); of(8);

typedef uint16_t input;

/* part [rows][2 sides]: a group's sums of inputs times codes. */
ALWAYS void multiply_codes(const int rows, const uint8_t *record, const input *x, int64_t stride, floats part[SOME][2]) {
    __m512i one_code = _mm512_set1_epi16(0x000f), above = _mm512_set1_epi16(0x4300);
    floats chains[SOME][2][2];
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
        chains[i][0][0] = chains[i][0][1] = chains[i][1][0] = chains[i][1][1] = _mm512_setzero_ps();
    for (int quad = 0; quad < GROUP / 4; quad++) {
        __m512i codes = _mm512_loadu_si512(record + quad * 64);
        prefetch(record + quad * 80 + AHEAD);
        #pragma GCC unroll 2
        for (int pair = 0; pair < 2; pair++) {
            __m512i l = pair ? _mm512_srli_epi16(codes, 8) : codes, r = _mm512_srli_epi16(codes, pair ? 12 : 4);
            __m512bh left = (__m512bh)_mm512_ternarylogic_epi32(l, one_code, above, 0xEA); /* l & one_code | above */
            __m512bh right = (__m512bh)_mm512_ternarylogic_epi32(r, one_code, above, 0xEA);
            const int chain = rows > 2 ? 0 : pair; /* few tokens: more sums, so that none waits for the one before */
            #pragma GCC unroll 8
            for (int i = 0; i < rows; i++) {
                __m512bh both = pair_at(x + i * stride + quad * 4 + pair * 2);
                chains[i][chain][0] = _mm512_dpbf16_ps(chains[i][chain][0], both, left);
                chains[i][chain][1] = _mm512_dpbf16_ps(chains[i][chain][1], both, right);
            }
        }
    }
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
        for (int side = 0; side < 2; side++)
            part[i][side] = rows > 2 ? chains[i][0][side] : _mm512_add_ps(chains[i][0][side], chains[i][1][side]);
}

/* The inputs as the products take them: as they are. totals: the sum of each group. */
static const input *inputs_of(const uint16_t *x, int64_t groups, float *totals, void *space) {
    (void)space;
    for (int64_t g = 0; g < groups; g++) totals[g] = sum_of(add_floats(load_bf16(x + g * GROUP), load_bf16(x + g * GROUP + 16)));
    return x;
}
