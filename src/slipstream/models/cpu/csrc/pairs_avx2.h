/* The products of 1 to 6 tokens by AVX2, for products_of_floats.h.
 *
 * In assembly, since 12 sums, the weights and an input take 15 of 16 registers: compilers keep a sum in memory, and each
 * of its additions then waits until the one before has been stored.
 */
#pragma once

_Static_assert(BLOCK == 128, "INPUT_OF has the number of inputs from a token's to the next one's");

/* Adds input n of token i times 16 outputs' weights. */
#define INPUT_OF(i, n)                                                                                               \
    "vbroadcastss 4*(" #i "*128+" #n ")(%[x]), %[one]\n\t"                                                           \
    "vfmadd231ps %[left], %[one], %[a" #i "]\n\tvfmadd231ps %[right], %[one], %[b" #i "]\n\t"
#define INPUTS_1(n) INPUT_OF(0, n)
#define INPUTS_2(n) INPUTS_1(n) INPUT_OF(1, n)
#define INPUTS_3(n) INPUTS_2(n) INPUT_OF(2, n)
#define INPUTS_4(n) INPUTS_3(n) INPUT_OF(3, n)
#define INPUTS_5(n) INPUTS_4(n) INPUT_OF(4, n)
#define INPUTS_6(n) INPUTS_5(n) INPUT_OF(5, n)
#define SUM(i) [a##i] "+x"(sums[i].a), [b##i] "+x"(sums[i].b)
#define ADD_PAIRS(inputs, ...)                                                                                       \
    __asm__ volatile("vmovdqa (%[pairs]), %[left]\n\tvmovdqa 32(%[pairs]), %[right]\n\t"                             \
                     "vpslld $16, %[left], %[left]\n\tvpslld $16, %[right], %[right]\n\t" inputs(0)                  \
                     "vmovdqa %[upper], %[right]\n\t"                                                                \
                     "vpand (%[pairs]), %[right], %[left]\n\tvpand 32(%[pairs]), %[right], %[right]\n\t" inputs(1)   \
                     : __VA_ARGS__, [left] "=&x"(left), [right] "=&x"(right), [one] "=&x"(one)                       \
                     : [x] "r"(x), [pairs] "r"(pairs), [upper] "m"(UPPER)                                            \
                     : "memory")
#define EIGHT(bits) {bits, bits, bits, bits, bits, bits, bits, bits}
static const uint32_t UPPER[8] __attribute__((aligned(32))) = EIGHT(0xffff0000);

/* As `add_pairs_plainly`. */
ALWAYS void add_pairs(const int tokens, floats *sums, const float *x, const uint16_t *pairs) {
    __m256 left, right, one;
    switch (tokens) {
    case 1: ADD_PAIRS(INPUTS_1, SUM(0)); break;
    case 2: ADD_PAIRS(INPUTS_2, SUM(0), SUM(1)); break;
    case 3: ADD_PAIRS(INPUTS_3, SUM(0), SUM(1), SUM(2)); break;
    case 4: ADD_PAIRS(INPUTS_4, SUM(0), SUM(1), SUM(2), SUM(3)); break;
    case 5: ADD_PAIRS(INPUTS_5, SUM(0), SUM(1), SUM(2), SUM(3), SUM(4)); break;
    case 6: ADD_PAIRS(INPUTS_6, SUM(0), SUM(1), SUM(2), SUM(3), SUM(4), SUM(5)); break;
    }
}
