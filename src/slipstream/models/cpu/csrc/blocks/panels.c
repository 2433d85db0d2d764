/* Packs a file's blocks as panels, and unpacks them; no number changes. */
#include "blocks.h"
#include "grids.h"
#include "integer_sums.h"

#ifndef _WIN32
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
#endif

/* Bytes of a panel's block. */
static int64_t panel_block_bytes(int64_t format) {
    const struct coding *of = &CODINGS[coding_of(format)];
    return SCALE_BYTES[of->scaling] + block_size(format) / GROUP * 64 * of->bits;
}

int64_t panel_bytes(int64_t format, int64_t inputs) {
    if (has_numbers(format)) return inputs * LANES * file_bytes(format);
    return round_up(inputs / block_size(format) * panel_block_bytes(format), 64);
}

/* Half-bytes: the low ones, then the high ones. */
static void read_nibbles(const uint8_t *both, int count, uint8_t *codes) {
    for (int j = 0; j < count; j++) codes[j] = both[j] & 15, codes[j + count] = both[j] >> 4;
}

static void add_fifth_bits(const uint8_t *from, uint8_t *codes) {
    uint32_t bits;
    memcpy(&bits, from, sizeof bits);
    for (int j = 0; j < GROUP; j++) codes[j] |= (uint8_t)((bits >> j & 1) << 4);
}

/* Four weights of an entry of a grid, whose signs are four bits; see grids.h. */
static void read_grid(uint16_t entry, uint8_t signs, uint8_t *codes) {
    for (int j = 0; j < 4; j++) codes[j] = (uint8_t)((entry >> 4 * j & 7) | (signs >> j & 1) << 3);
}

/* The digit of weight i of TQ1_0: of a number in base 3, whose first digits are those of a fraction of 256. */
static uint8_t ternary_digit(const uint8_t *block, int i) {
    static const uint8_t POWERS[5] = {1, 3, 9, 27, 81};
    int place = i < 160 ? i / 32 : i < 240 ? (i - 160) / 16 : (i - 240) / 4;
    int at = i < 160 ? i % 32 : i < 240 ? 32 + i % 16 : 48 + i % 4;
    return (uint8_t)((uint8_t)(block[at] * POWERS[place]) * 3 >> 8);
}

/* The codes of 32 weights of a block of the file, from weight 32 * g on. ggml-common.h has the layout of the blocks. */
static void read_codes(int64_t type, const uint8_t *block, int g, uint8_t *codes) {
    const int quarter = 2 * (g % 4); /* which bits of a byte hold codes of 2 bits */
    uint32_t word;
    switch (type) {
        case MXFP4: read_nibbles(block + 1, 16, codes); break;
        case Q4_0: case IQ4_NL: read_nibbles(block + 2, 16, codes); break;
        case Q4_1: read_nibbles(block + 4, 16, codes); break;
        case Q5_0: read_nibbles(block + 6, 16, codes), add_fifth_bits(block + 2, codes); break;
        case Q5_1: read_nibbles(block + 8, 16, codes), add_fifth_bits(block + 4, codes); break;
        case IQ4_XS: read_nibbles(block + 8 + g * 16, 16, codes); break;
        case NVFP4:
            for (int half = 0; half < 2; half++) read_nibbles(block + 4 + (2 * g + half) * 8, 8, codes + 16 * half);
            break;
        case Q8_0:
            for (int j = 0; j < GROUP; j++) codes[j] = block[2 + j] ^ 0x80;
            break;
        case Q4_K:
            for (int j = 0; j < GROUP; j++) codes[j] = block[16 + g / 2 * 32 + j] >> g % 2 * 4 & 15;
            break;
        case Q5_K:
            for (int j = 0; j < GROUP; j++)
                codes[j] = (uint8_t)((block[48 + g / 2 * 32 + j] >> g % 2 * 4 & 15) | (block[16 + j] >> g & 1) << 4);
            break;
        case Q6_K:
            for (int j = 0; j < GROUP; j++) {
                uint8_t low = block[g / 4 * 64 + g % 2 * 32 + j] >> g / 2 % 2 * 4 & 15;
                codes[j] = (uint8_t)(low | (block[128 + g / 4 * 32 + j] >> quarter & 3) << 4);
            }
            break;
        case Q3_K:
            for (int j = 0; j < GROUP; j++)
                codes[j] = (uint8_t)((block[32 + g / 4 * 32 + j] >> quarter & 3) | (block[j] >> g & 1) << 2);
            break;
        case Q2_K:
            for (int j = 0; j < GROUP; j++) codes[j] = block[16 + g / 4 * 32 + j] >> quarter & 3;
            break;
        case TQ2_0:
            for (int j = 0; j < GROUP; j++) codes[j] = block[g / 4 * 32 + j] >> quarter & 3;
            break;
        case TQ1_0:
            for (int j = 0; j < GROUP; j++) codes[j] = ternary_digit(block, g * GROUP + j);
            break;
        case IQ3_S:
            for (int k = 0; k < 8; k++) {
                int entry = block[2 + g * 8 + k] | (block[66 + g] >> k & 1) << 8;
                read_grid(IQ3_S_GRID[entry], block[74 + g * 4 + k / 2] >> k % 2 * 4, codes + 4 * k);
            }
            break;
        case IQ3_XXS:
            memcpy(&word, block + 66 + g * 4, 4);
            for (int k = 0; k < 8; k++) {
                uint8_t signs = word >> k / 2 * 7 & 127;
                signs |= (uint8_t)(__builtin_parity(signs) << 7);
                read_grid(IQ3_XXS_GRID[block[2 + g * 8 + k]], signs >> k % 2 * 4, codes + 4 * k);
            }
            break;
        default: /* INT4, INT4_MINIMA */ memcpy(codes, block + SHAPES[type].bytes + g * GROUP, GROUP);
    }
}

/* Puts some bits of the codes of 32 inputs of output `lane` into a plane, see CODINGS_OF. from: the first of these bits. */
ALWAYS void place_plane(const int bits, const int from, const uint8_t *codes, int lane, uint8_t *plane) {
    uint32_t four[8], vectors[8] = {0};
    memcpy(four, codes, sizeof four);
    #pragma GCC unroll 8
    for (int v = 0; v < 8; v++)
        vectors[v % bits] |= (four[v] >> from & 0x01010101u * (uint32_t)((1 << bits) - 1)) << v / bits * bits;
    #pragma GCC unroll 8
    for (int v = 0; v < bits; v++) memcpy(plane + v * 64 + lane * 4, vectors + v, 4);
}

ALWAYS void place_codes(int bits, const uint8_t *codes, int lane, uint8_t *to) {
    switch (bits) {
        case 2: case 3: place_plane(2, 0, codes, lane, to); break;
        case 8: place_plane(8, 0, codes, lane, to); break;
        default: place_plane(4, 0, codes, lane, to);
    }
    switch (bits) {
        case 3: place_plane(1, 2, codes, lane, to + 2 * 64); break;
        case 5: place_plane(1, 4, codes, lane, to + 4 * 64); break;
        case 6: place_plane(2, 4, codes, lane, to + 4 * 64); break;
        default: break; /* one plane */
    }
}

/* The 6-bit scale and minimum of 32 weights of Q4_K and Q5_K. */
static void super_scale(const uint8_t *s, int j, uint8_t *scale, uint8_t *minimum) {
    *scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
    *minimum = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6) << 4;
}

/* The byte of 32 weights that multiplies a block's scale. */
static uint8_t scale_of_32(int64_t type, const uint8_t *block, int g) {
    if (type == IQ4_XS) return (uint8_t)(((block[4 + g / 2] >> g % 2 * 4 & 15) | (block[2 + g / 4] >> g % 4 * 2 & 3) << 4) - 32);
    if (type == IQ3_S) return (uint8_t)(1 + 2 * (block[106 + g / 2] >> g % 2 * 4 & 15));
    return (uint8_t)(1 + 2 * (block[66 + g * 4 + 3] >> 4)); /* IQ3_XXS */
}

/* The byte of 16 weights. */
static uint8_t scale_of_16(int64_t type, const uint8_t *block, int j) {
    if (type == Q2_K) return block[j];
    if (type == Q3_K) return (uint8_t)(((block[96 + j % 8] >> j / 8 * 4 & 15) | (block[104 + j % 4] >> j / 4 * 2 & 3) << 4) - 32);
    return type == Q6_K ? block[192 + j] : 0x11; /* TQ1_0 and TQ2_0 have a scale, which is the minimum, too */
}

/* Where the float16 scale of a block is, and behind it the minimum. */
static int64_t scale_place(int64_t type) {
    return type == Q6_K ? 208 : type == Q3_K ? 108 : type == Q2_K ? 80 : type == TQ2_0 ? 64 : type == TQ1_0 ? 52 : 0;
}

static void place_scales(int64_t type, const uint8_t *block, int lane, uint8_t *to) {
    const enum scaling by = CODINGS[coding_of(type)].scaling;
    const uint8_t *halves = block + scale_place(type);
    uint8_t *bytes = to + lane;
    switch (by) {
        case POWERS_OF_2: *bytes = block[0]; return;
        case SMALL_FLOATS: /* the largest of E4M3 would be no number */
            for (int j = 0; j < 4; j++) bytes[j * LANES] = block[j] == 0x7F ? 0 : block[j] & 0x7F;
            return;
        case FLOATS_WITH_MINIMA: memcpy(to + lane * 4, block, 4), memcpy(to + (LANES + lane) * 4, block + 4, 4); return;
        case WITH_OFFSET: bytes[2 * LANES] = block[2]; break;
        case BYTES_OF_32:
            for (int g = 0; g < 8; g++) bytes[(2 + g) * LANES] = scale_of_32(type, block, g);
            break;
        case BYTES_OF_16:
            for (int j = 0; j < 16; j++) bytes[(2 + j) * LANES] = scale_of_16(type, block, j);
            break;
        case NIBBLES_WITH_MINIMA:
            for (int j = 0; j < 16; j++) bytes[(4 + j) * LANES] = scale_of_16(type, block, j);
            memcpy(to + 32 + lane * 2, halves + (type == Q2_K ? 2 : 0), 2);
            break;
        case BYTES_WITH_MINIMA:
            for (int j = 0; j < 8; j++) super_scale(block + 4, j, bytes + (4 + j) * LANES, bytes + (12 + j) * LANES);
            memcpy(to + 32 + lane * 2, halves + 2, 2);
            break;
        case WITH_MINIMUM: memcpy(to + 32 + lane * 2, halves + 2, 2); break;
        case ONE_SCALE: break;
    }
    memcpy(to + lane * 2, halves, 2);
}

/* Whether any of some numbers of `step` bytes is infinite or NaN. exponent: the bits that are all set in such numbers. */
static int any_not_finite(const uint8_t *numbers, int64_t count, int64_t step, uint32_t exponent) {
    uint32_t any = 0;
    for (int64_t i = 0; step == 4 && i < count; i++) {
        uint32_t number;
        memcpy(&number, numbers + 4 * i, 4), any |= (number & exponent) == exponent;
    }
    for (int64_t i = 0; step == 2 && i < count; i++) {
        uint16_t number;
        memcpy(&number, numbers + 2 * i, 2), any |= (number & exponent) == exponent;
    }
    return (int)any;
}

/* Whether a row has a number, or a block's scale or minimum, that is infinite or NaN. */
static int row_is_not_finite(int64_t format, const uint8_t *row, int64_t inputs) {
    const int64_t type = format % KINDS, step = file_bytes(format);
    const enum scaling by = CODINGS[coding_of(format)].scaling;
    int any = 0;
    if (has_numbers(format)) return any_not_finite(row, inputs, step, type == F32 ? 0x7F800000 : type == F16 ? 0x7C00 : 0x7F80);
    for (int64_t at = 0; at < inputs; at += block_size(format), row += step) {
        if (by == POWERS_OF_2) any |= row[0] == 0xFF;
        else if (by == FLOATS_WITH_MINIMA) any |= any_not_finite(row, 2, 4, 0x7F800000);
        else if (by != SMALL_FLOATS) {
            int has_two = by == WITH_MINIMUM || by == BYTES_WITH_MINIMA || type == Q2_K;
            any |= any_not_finite(row + scale_place(type), 1 + has_two, 2, 0x7C00);
        }
    }
    return any;
}

static void pack_row(int64_t format, const uint8_t *row, int64_t inputs, int lane, uint8_t *to) {
    const int64_t type = format % KINDS, step = file_bytes(format);
    const struct coding *of = &CODINGS[coding_of(format)];
    if (has_numbers(format)) {
        for (int64_t i = 0; i < inputs; i++) memcpy(to + (i * LANES + lane) * step, row + i * step, (size_t)step);
        return;
    }
    for (int64_t at = 0; at < inputs; at += block_size(format), row += step, to += panel_block_bytes(format)) {
        place_scales(type, row, lane, to);
        for (int64_t g = 0; g < block_size(format) / GROUP; g++) {
            uint8_t codes[GROUP];
            read_codes(type, row, (int)g, codes);
            place_codes(of->bits, codes, lane, to + SCALE_BYTES[of->scaling] + g * 64 * of->bits);
        }
    }
}

static void pack_panel(int64_t panel, void *given) {
    struct packing *p = given;
    uint8_t *own = p->to + panel * panel_bytes(p->format, p->inputs);
    for (int64_t number = panel * LANES; number < least(p->count, (panel + 1) * LANES); number++) {
        const uint8_t *row = p->rows + number * row_bytes(p->format, p->inputs);
        if (row_is_not_finite(p->format, row, p->inputs)) atomic_store(&p->is_not_finite, 1);
        pack_row(p->format, row, p->inputs, (int)(number % LANES), own);
    }
}

int32_t pack_panels(int64_t format, const uint8_t *rows, int64_t count, int64_t inputs, uint8_t *to, int shared) {
    struct packing packing = {format, count, inputs, rows, to, 0};
    for_each(round_up(count, LANES) / LANES, shared, pack_panel, &packing);
    return !atomic_load(&packing.is_not_finite);
}

/* An output's weights of a panel of codes, by the type's definition, rounded at most once. */
static void unpack_codes(int64_t format, const uint8_t *panel, int64_t lane, int64_t inputs, float *to) {
    const int coding = (int)coding_of(format), bits = CODINGS[coding].bits;
    const struct meaning of = meaning_of(coding, format % KINDS);
    const int64_t groups = block_size(format) / GROUP;
    for (int64_t i = 0; i < inputs; panel += panel_block_bytes(format))
        for (int64_t g = 0; g < groups; g++) {
            const uint8_t *codes = panel + SCALE_BYTES[CODINGS[coding].scaling] + g * 64 * bits;
            uint8_t wide[8][4 * LANES];
            float scale[LANES], minimum[LANES];
            for (int v = 0; v < 4; v++) {
                bytes one, other;
                load_codes(coding, &of, codes, v, &one, &other);
                memcpy(wide[v], &one, sizeof one), memcpy(wide[v + 4], &other, sizeof other);
            }
            for (int j = 0; j < GROUP; j++, i++) {
                if (j % 16 == 0) {
                    const int half = halves_of(coding) == 2 && j > 0;
                    store_floats(scale, scale_of(coding, &of, panel, g, half));
                    if (has_minimum(coding)) store_floats(minimum, minimum_of(coding, panel, g, half));
                }
                float product = scale[lane] * (float)(wide[j / 4][lane * 4 + j % 4] - zero_of(coding));
                to[i] = !has_minimum(coding) ? product : subtracts(coding) ? product - minimum[lane] : product + minimum[lane];
            }
        }
}

/* Weights [count][inputs] of some outputs of a part. */
void unpack_rows(const struct block_part *part, int64_t inputs, const int64_t *outputs, int64_t count, float *to) {
    for (int64_t row = 0; row < count; row++, to += inputs) {
        const uint8_t *panel = part->data + outputs[row] / LANES * panel_bytes(part->format, inputs);
        if (has_numbers(part->format)) unpack_numbers(part->format, panel, outputs[row] % LANES, inputs, to);
        else unpack_codes(part->format, panel, outputs[row] % LANES, inputs, to);
        for (int64_t i = 0; part->scale && i < inputs; i++) to[i] *= *part->scale;
    }
}

#ifndef _WIN32 /* packs rows of a file with POSIX functions, a few at a time so that they stay in the cache */
static int read_whole(int file, uint8_t *to, int64_t size, int64_t at) {
    while (size > 0) {
        ssize_t read = pread(file, to, (size_t)size, (off_t)at);
        if (read < 0 && errno == EINTR) continue;
        if (read <= 0) return 0;
        to += read, at += read, size -= read;
    }
    return 1;
}

enum packed pack_piece(int file, const struct file_piece *piece) {
    int64_t row = row_bytes(piece->format, piece->inputs);
    uint8_t *rows = malloc((size_t)(LANES * row));
    enum packed packed = rows != NULL ? PACKED : UNREAD;
    for (int64_t at = 0; packed == PACKED && at < piece->rows; at += LANES) {
        int64_t count = least(LANES, piece->rows - at);
        uint8_t *to = piece->to + at / LANES * panel_bytes(piece->format, piece->inputs);
        if (!read_whole(file, rows, count * row, piece->start + at * row)) packed = UNREAD;
        else if (!pack_panels(piece->format, rows, count, piece->inputs, to, 0)) packed = NOT_FINITE;
    }
    free(rows);
    return packed;
}

/* Packs the pieces that no thread has taken yet; `*next` is the first. To be called in every thread that shall help.
 * Touches nothing but the file and the pieces' own panels. drops: whether the system is to drop its copy of what was
 * read. Returns -1, or the number of a piece that was not read, see `pack_piece`, or `count` more than that of one whose
 * numbers are not all finite. */
int64_t pack_pieces(int32_t file, const struct file_piece *pieces, int64_t count, _Atomic int64_t *next, int32_t drops) {
    for (int64_t number; (number = take(next)) < count;) {
        const struct file_piece *piece = pieces + number;
        enum packed packed = pack_piece(file, piece);
        if (packed != PACKED) return packed == UNREAD ? number : count + number;
#ifdef POSIX_FADV_DONTNEED
        if (drops) posix_fadvise(file, (off_t)piece->start, (off_t)(piece->rows * row_bytes(piece->format, piece->inputs)), POSIX_FADV_DONTNEED);
#else
        (void)drops;
#endif
    }
    return -1;
}
#endif
