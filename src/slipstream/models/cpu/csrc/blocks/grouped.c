/* Panels of quantised checkpoints whose weights fit none of GGUF's blocks: 4-bit codes in groups of any multiple of 32
 * inputs, and matrices that were left in floating point.
 *
 * In the rows to be packed, a group's scales precede its codes, one byte a code. INT4: a float16 scale, a signed byte
 * of offset and an unused byte; a weight is scale * (code - 8 + offset). INT4_MINIMA: a float32 scale and a float32
 * minimum; a weight is scale * (code - 8) + minimum. Weights in floating point are multiplied by activations that are
 * not rounded, and the products are added in a fixed order, those of even and of odd inputs apart: here, too, a token's
 * result does not depend on the tokens beside it.
 */
#include "blocks.h"
#include "integer_sums.h"

enum { CODES = 256 /* bytes of 32 inputs */ };

static int64_t row_head(int64_t kind) { return kind == INT4 ? 4 : 8; }
static int64_t number_bytes(int64_t kind) { return kind == FLOAT32 ? 4 : 2; }
static int is_float(int64_t kind) { return kind == BFLOAT16 || kind == FLOAT16 || kind == FLOAT32; }

/* Bytes of a panel's block. */
static int64_t grouped_block_bytes(int64_t kind, int64_t group) { return grouped_scale_bytes(kind) + group / GROUP * CODES; }

int64_t grouped_panel_bytes(int64_t format, int64_t inputs) {
    int64_t kind = format % KINDS, group = format / KINDS;
    if (is_float(kind)) return inputs * LANES * number_bytes(kind);
    return round_up(inputs / group * grouped_block_bytes(kind, group), 64);
}

static void pack_numbers(int64_t kind, const uint8_t *row, int64_t inputs, int lane, uint8_t *to) {
    size_t bytes = (size_t)number_bytes(kind);
    for (int64_t i = 0; i < inputs; i++) memcpy(to + (i * LANES + lane) * (int64_t)bytes, row + i * (int64_t)bytes, bytes);
}

static void pack_groups(int64_t kind, int64_t group, const uint8_t *row, int64_t inputs, int lane, uint8_t *to) {
    for (int64_t at = 0; at < inputs; at += group, to += grouped_block_bytes(kind, group)) {
        const uint8_t *codes = row + row_head(kind);
        memcpy(to + lane * (kind == INT4 ? 2 : 4), row, kind == INT4 ? 2 : 4);
        if (kind == INT4) to[2 * LANES + lane] = row[2];
        else memcpy(to + 4 * LANES + lane * 4, row + 4, 4);
        for (int64_t j = 0; j < group; j++) {
            int v = (int)(j % GROUP) / 4;
            uint8_t *vectors = to + grouped_scale_bytes(kind) + j / GROUP * CODES;
            vectors[v % 4 * 64 + lane * 4 + j % 4] |= (uint8_t)(codes[j] << (v < 4 ? 0 : 4));
        }
        row = codes + group;
    }
}

/* See pack_panels. */
void pack_grouped_panel(int64_t panel, void *given) {
    const struct packing *p = given;
    int64_t kind = p->format % KINDS, group = p->format / KINDS;
    int64_t row = is_float(kind) ? p->inputs * number_bytes(kind) : p->inputs / group * (row_head(kind) + group);
    uint8_t *own = p->to + panel * grouped_panel_bytes(p->format, p->inputs);
    for (int lane = 0; lane < LANES && panel * LANES + lane < p->count; lane++) {
        const uint8_t *from = p->rows + (panel * LANES + lane) * row;
        if (is_float(kind)) pack_numbers(kind, from, p->inputs, lane, own);
        else pack_groups(kind, group, from, p->inputs, lane, own);
    }
}

static float number(int64_t kind, const uint8_t *from) {
    uint16_t half;
    if (kind == FLOAT32) return float_at(from);
    memcpy(&half, from, 2);
    if (kind == FLOAT16) return half_to_float(half);
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* See unpack_rows. */
void unpack_grouped(const struct block_part *part, int64_t inputs, const int64_t *outputs, int64_t count, float *to) {
    int64_t kind = part->format % KINDS, group = part->format / KINDS;
    for (int64_t row = 0; row < count; row++) {
        const uint8_t *own = part->data + outputs[row] / LANES * grouped_panel_bytes(part->format, inputs);
        int64_t lane = outputs[row] % LANES;
        for (int64_t i = 0; i < inputs; i++) {
            if (is_float(kind)) {
                to[row * inputs + i] = number(kind, own + (i * LANES + lane) * number_bytes(kind));
                continue;
            }
            int v = (int)(i % GROUP) / 4;
            const uint8_t *scales = own + i / group * grouped_block_bytes(kind, group);
            const uint8_t *vectors = scales + grouped_scale_bytes(kind) + i % group / GROUP * CODES;
            int code = (vectors[v % 4 * 64 + lane * 4 + i % 4] >> (v < 4 ? 0 : 4) & 15) - 8;
            if (kind == INT4)
                to[row * inputs + i] = number(FLOAT16, scales + lane * 2) * (float)(code + (int8_t)scales[2 * LANES + lane]);
            else
                to[row * inputs + i] = float_at(scales + lane * 4) * (float)code + float_at(scales + (LANES + lane) * 4);
        }
    }
}

/* A panel of codes times a tile: sums [rows][LANES]; as add_panel of panel_sums.c. */
ALWAYS void add_codes(const int kind, const int rows, const int planes, const uint8_t *panel, int64_t inputs,
                      int64_t group, const uint8_t *x, float *sums) {
    floats whole[TILE];
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++) whole[i] = all_floats(0);
    for (int64_t at = 0; at < inputs; at += group) {
        floats scale = kind == INT4 ? load_halves(panel) : load_floats((const float *)panel), minimum;
        if (kind == INT4) minimum = multiply_floats(scale, load_signed(panel + 2 * LANES));
        else minimum = load_floats((const float *)panel + LANES);
        fetch(panel, grouped_scale_bytes(kind), rows);
        panel += grouped_scale_bytes(kind);
        for (int64_t j = 0; j < group; j += GROUP) {
            const uint8_t *marks = marks_of(x, rows, planes);
            ints exact[2 * TILE];
            fetch(panel, CODES, rows);
            integer_sums(Q4_0, 0, rows, planes, panel, x, exact);
            #pragma GCC unroll 8
            for (int i = 0; i < rows; i++) {
                floats now = add_scaled(whole[i], rows, planes, exact, i, marks, scale);
                now = add_product(now, total_of(rows, i, marks), minimum);
                SETTLED(now);
                whole[i] = now;
            }
            panel += CODES, x += (32 * planes + 4 * MARKS) * rows;
        }
    }
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++) store_floats(sums + i * LANES, whole[i]);
}

ALWAYS floats load_brain_floats(const uint8_t *from) {
#if defined(__AVX512VNNI__)
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from)), 16));
#elif defined(__AVX2__)
    __m256i one = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)from));
    __m256i other = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(from + 16)));
    return FLOATS(_mm256_castsi256_ps(_mm256_slli_epi32(one, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(other, 16)));
#else
    uint16_t halves[LANES];
    uint32_t bits[LANES];
    float numbers[LANES];
    memcpy(halves, from, sizeof halves);
    for (int o = 0; o < LANES; o++) bits[o] = (uint32_t)halves[o] << 16;
    memcpy(numbers, bits, sizeof numbers);
    return load_floats(numbers);
#endif
}

ALWAYS floats load_weights(const int kind, const uint8_t *from) {
    return kind == FLOAT32 ? load_floats((const float *)from) : kind == FLOAT16 ? load_halves(from) : load_brain_floats(from);
}

/* A panel of numbers times tokens [there][inputs]: sums [rows][LANES], of which only the first `there` count. */
ALWAYS void add_numbers(const int kind, const int rows, const uint8_t *panel, int64_t inputs, const float *x,
                        int64_t there, float *sums) {
    const int each = LANES * (kind == FLOAT32 ? 4 : 2);
    const float *row[TILE];
    floats even[TILE], odd[TILE];
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++) row[i] = x + (i < there ? i : 0) * inputs, even[i] = odd[i] = all_floats(0);
    for (int64_t in = 0; in < inputs; in += 2, panel += 2 * each) {
        fetch(panel, 2 * each, rows);
        floats first = load_weights(kind, panel), second = load_weights(kind, panel + each);
        #pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            even[i] = add_product(even[i], first, all_floats(row[i][in]));
            odd[i] = add_product(odd[i], second, all_floats(row[i][in + 1]));
        }
    }
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++) store_floats(sums + i * LANES, add_floats(even[i], odd[i]));
}

typedef void codes_function(const uint8_t *panel, int64_t inputs, int64_t group, const uint8_t *x, float *sums);
typedef void numbers_function(const uint8_t *panel, int64_t inputs, const float *x, int64_t there, float *sums);

#define CODES_OF(kind, rows, planes)                                                                                   \
    static void kind##_##rows##_##planes(const uint8_t *panel, int64_t inputs, int64_t group, const uint8_t *x,        \
                                         float *sums) {                                                                \
        add_codes(kind, rows, planes, panel, inputs, group, x, sums);                                                  \
    }
#define NUMBERS_OF(kind, rows, unused)                                                                                 \
    static void kind##_##rows##_0(const uint8_t *panel, int64_t inputs, const float *x, int64_t there, float *sums) {  \
        add_numbers(kind, rows, panel, inputs, x, there, sums);                                                        \
    }
#define ALL_ROWS(of, kind, planes) \
    of(kind, 1, planes) of(kind, 2, planes) of(kind, 3, planes) of(kind, 4, planes) of(kind, 6, planes) of(kind, 8, planes)
ALL_ROWS(CODES_OF, INT4, 1) ALL_ROWS(CODES_OF, INT4, 2) ALL_ROWS(CODES_OF, INT4_MINIMA, 1) ALL_ROWS(CODES_OF, INT4_MINIMA, 2)
ALL_ROWS(NUMBERS_OF, BFLOAT16, 0) ALL_ROWS(NUMBERS_OF, FLOAT16, 0) ALL_ROWS(NUMBERS_OF, FLOAT32, 0)

#define TABLE(kind, planes)                                                                      \
    {                                                                                            \
        [1] = kind##_1_##planes, [2] = kind##_2_##planes, [3] = kind##_3_##planes,               \
        [4] = kind##_4_##planes, [6] = kind##_6_##planes, [8] = kind##_8_##planes                \
    }
static codes_function *const OF_CODES[][2][TILE + 1] = {
    [INT4 - INT4] = {TABLE(INT4, 1), TABLE(INT4, 2)},
    [INT4_MINIMA - INT4] = {TABLE(INT4_MINIMA, 1), TABLE(INT4_MINIMA, 2)},
};
static numbers_function *const OF_NUMBERS[][TILE + 1] = {
    [BFLOAT16 - BFLOAT16] = TABLE(BFLOAT16, 0), [FLOAT16 - BFLOAT16] = TABLE(FLOAT16, 0),
    [FLOAT32 - BFLOAT16] = TABLE(FLOAT32, 0),
};

void grouped_sums(int64_t format, const uint8_t *panel, int64_t inputs, int64_t rows, int64_t planes, const uint8_t *x,
                  const float *plain, float *sums) {
    int64_t kind = format % KINDS;
    if (is_float(kind)) OF_NUMBERS[kind - BFLOAT16][places(rows)](panel, inputs, plain, rows, sums);
    else OF_CODES[kind - INT4][planes - 1][places(rows)](panel, inputs, format / KINDS, x, sums);
}
