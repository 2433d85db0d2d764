/* Products of 4-bit codes with 8-bit activations, in integers, for int4.c: 32 inputs of a token share a scale, their
 * largest magnitude over 127. The bytes of a word are the codes of its inputs in the order 0, 2, 1, 3, of one side in
 * the low four bits, of the other in the high ones. */
#include "blocks/dots.h"

enum { SOME = 8 /* tokens multiplied at a time */, ADDED = 0 /* to every code */, PER_GROUP = 1 };
#define EVERY_ROWS(of) of(1); of(2); of(3); of(4); of(5); of(6); of(7); of(8);

typedef struct {
    uint8_t words[GROUP];
    float scale;
} input; /* 32 inputs */

/* part [rows][2 sides]: a group's sums of inputs times codes. */
ALWAYS void multiply_codes(const int rows, const uint8_t *record, const input *x, int64_t stride, floats part[SOME][2]) {
    const int64_t step = stride * (int64_t)sizeof *x;
    for (int line = 0; line < RECORD; line += 64) prefetch(record + line + AHEAD);
    #pragma GCC unroll 2
    for (int side = 0; side < 2; side++) {
        ints sums[SOME];
        #pragma GCC unroll 8
        for (int i = 0; i < rows; i++) sums[i] = all_ints(0);
        #pragma GCC unroll 2
        for (int quad = 0; quad < GROUP / 4; quad += 4) {
            bytes four[4];
            const uint8_t *words[4];
            #pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                bytes both = load_bytes(record + (quad + k) * 64);
                four[k] = side ? high_bits(both) : low_bits(both), words[k] = x->words + (quad + k) * 4;
            }
            add_four_vectors(4, rows, four, words, step, quad == 0, quad == 4, sums);
        }
        #pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
            part[i][side] = multiply_floats(to_floats(sums[i]), all_floats(x[i * stride].scale));
    }
}

/* The inputs as the products take them, and the sum of each group; `space` is where there is room for them. */
static const input *inputs_of(const uint16_t *x, int64_t groups, float *totals, void *space) {
    const float smallest = 1e-30f; /* of a magnitude that is not taken for 0, whose inverse would be infinite */
    input *to = space;
    for (int64_t g = 0; g < groups; g++, x += GROUP) {
        floats halves[2] = {load_bf16(x), load_bf16(x + 16)};
        float most = largest_magnitude(halves[0], halves[1]);
        floats times = all_floats(most > smallest && most < INFINITY ? 127 / most : 0);
        uint8_t narrow[GROUP];
        for (int half = 0; half < 2; half++)
            store_narrow(narrow + half * 16, to_ints(multiply_floats(halves[half], times)));
        for (int i = 0; i < GROUP; i += 4)
            to[g].words[i] = narrow[i], to[g].words[i + 1] = narrow[i + 2], to[g].words[i + 2] = narrow[i + 1],
            to[g].words[i + 3] = narrow[i + 3];
        to[g].scale = most / 127;
        totals[g] = sum_of(add_floats(halves[0], halves[1]));
    }
    return to;
}
