/* Products of 4-bit codes in float32, for int4.c. */

enum { SOME = 6 /* tokens multiplied at a time */, ADDED = 0 /* to every code */ };
#define EVERY_ROWS(of) of(1); of(2); of(3); of(4); of(5); of(6);

typedef float input;

/* part [rows][2 sides]: a group's sums of inputs times codes. */
ALWAYS void multiply_codes(const int rows, const uint8_t *record, const input *x, int64_t stride, floats part[SOME][2]) {
    for (int line = 0; line < RECORD; line += 64) prefetch(record + line + AHEAD);
    #pragma GCC unroll 2
    for (int side = 0; side < 2; side++) {
        floats sum[SOME];
        #pragma GCC unroll 6
        for (int i = 0; i < rows; i++) sum[i] = all_floats(0);
        for (int quad = 0; quad < GROUP / 4; quad++)
            #pragma GCC unroll 4
            for (int n = 0; n < 4; n++) { /* input quad * 4 + n */
                floats codes = four_bits(record + quad * 64, n % 2 * 16 + (n / 2 * 2 + side) * 4);
                #pragma GCC unroll 6
                for (int i = 0; i < rows; i++)
                    sum[i] = add_product(sum[i], all_floats(x[i * stride + quad * 4 + n]), codes);
            }
        #pragma GCC unroll 6
        for (int i = 0; i < rows; i++) part[i][side] = sum[i];
    }
}
