/* Packs a file's blocks as panels, and unpacks them; no number changes. ggml-common.h has the layout of the blocks. */
#include "blocks.h"

#ifndef _WIN32
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>
#endif

int64_t panel_bytes(int64_t format, int64_t inputs) {
    if (is_grouped(format)) return grouped_panel_bytes(format, inputs);
    const struct shape *of = &SHAPES[format];
    return round_up(inputs / of->size * block_bytes(of), 64);
}

/* The 6-bit scale and minimum of 32 values of Q4_K and Q5_K. */
static void super_scale(const uint8_t *s, int j, uint8_t *scale, uint8_t *minimum) {
    *scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
    *minimum = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6) << 4;
}

/* The codes of a block of the file, none negative. */
static void read_codes(int64_t format, const uint8_t *block, uint8_t *codes) {
    int has_minimum = format == Q4_1 || format == Q5_1;
    switch (format) {
        case Q4_0: case Q4_1:
            for (int j = 0; j < 16; j++) {
                uint8_t both = block[2 + 2 * has_minimum + j];
                codes[j] = both & 15, codes[j + 16] = both >> 4;
            }
            break;
        case Q5_0: case Q5_1: {
            uint32_t high;
            memcpy(&high, block + 2 + 2 * has_minimum, sizeof high);
            for (int j = 0; j < 16; j++) {
                uint8_t both = block[6 + 2 * has_minimum + j];
                codes[j] = (both & 15) | (high >> j & 1) << 4, codes[j + 16] = both >> 4 | (high >> (j + 16) & 1) << 4;
            }
            break;
        }
        case Q8_0:
            for (int j = 0; j < 32; j++) codes[j] = block[2 + j] ^ 0x80;
            break;
        case Q4_K: case Q5_K:
            for (int run = 0; run < 8; run++) {
                const uint8_t *both = block + (format == Q4_K ? 16 : 48) + run / 2 * 32;
                uint8_t *own = codes + run * 32;
                for (int l = 0; l < 32; l++) own[l] = both[l] >> run % 2 * 4 & 15;
                if (format == Q5_K)
                    for (int l = 0; l < 32; l++) own[l] |= (uint8_t)((block[16 + l] >> run & 1) << 4);
            }
            break;
        default:
            for (int run = 0; run < 8; run++) {
                const uint8_t *low = block + run / 4 * 64 + run % 2 * 32, *high = block + 128 + run / 4 * 32;
                for (int l = 0; l < 32; l++)
                    codes[run * 32 + l] = (uint8_t)((low[l] >> run / 2 % 2 * 4 & 15) | (high[l] >> run % 4 * 2 & 3) << 4);
            }
    }
}

/* Puts the codes of 32 inputs of output `lane` into their vectors, four inputs at a time. */
static void place_codes(int64_t format, const uint8_t *codes, int lane, uint8_t *to) {
    uint32_t four[8], fifth = 0, late[2] = {0, 0};
    memcpy(four, codes, sizeof four);
    to += lane * 4;
    if (format == Q8_0) {
        for (int v = 0; v < 8; v++) memcpy(to + v * 64, &four[v], 4);
        return;
    }
    for (int v = 0; v < 4; v++) {
        uint32_t both = (four[v] & 0x0F0F0F0F) | (four[v + 4] & 0x0F0F0F0F) << 4;
        memcpy(to + v * 64, &both, 4);
    }
    if (SHAPES[format].codes == 320) {
        for (int v = 0; v < 8; v++) fifth |= (four[v] >> 4 & 0x01010101) << v;
        memcpy(to + 256, &fifth, 4);
    }
    if (format == Q6_K) {
        for (int v = 0; v < 8; v++) late[v / 4] |= (four[v] >> 4 & 0x03030303) << 2 * (v % 4);
        memcpy(to + 256, &late[0], 4), memcpy(to + 320, &late[1], 4);
    }
}

/* The code of input j of output `lane`. */
static int code_at(int64_t format, const uint8_t *from, int lane, int j) {
    int v = j / 4, at = lane * 4 + j % 4;
    if (format == Q8_0) return from[v * 64 + at];
    int code = from[v % 4 * 64 + at] >> (v < 4 ? 0 : 4) & 15;
    if (SHAPES[format].codes == 320) code |= (from[256 + at] >> v & 1) << 4;
    if (format == Q6_K) code |= (from[256 + v / 4 * 64 + at] >> 2 * (v % 4) & 3) << 4;
    return code;
}

static void place_scales(int64_t format, const uint8_t *block, int lane, uint8_t *to) {
    memcpy(to + lane * 2, block + (format == Q6_K ? 208 : 0), 2);
    if (SHAPES[format].scales != 32 && format != Q6_K) memcpy(to + 32 + lane * 2, block + 2, 2);
    if (format == Q4_K || format == Q5_K)
        for (int j = 0; j < 8; j++) super_scale(block + 4, j, to + 64 + j * LANES + lane, to + 192 + j * LANES + lane);
    if (format == Q6_K)
        for (int j = 0; j < 16; j++) to[32 + j * LANES + lane] = block[192 + j];
}

static void pack_panel(int64_t panel, void *given) {
    const struct packing *p = given;
    const struct shape *of = &SHAPES[p->format];
    int64_t blocks = p->inputs / of->size, each = block_bytes(of);
    uint8_t *own = p->to + panel * panel_bytes(p->format, p->inputs);
    for (int lane = 0; lane < LANES && panel * LANES + lane < p->count; lane++)
        for (int64_t b = 0; b < blocks; b++) {
            const uint8_t *block = p->rows + ((panel * LANES + lane) * blocks + b) * of->bytes;
            uint8_t codes[SUPER];
            read_codes(p->format, block, codes);
            place_scales(p->format, block, lane, own + b * each);
            for (int64_t g = 0; g < of->size / GROUP; g++)
                place_codes(p->format, codes + g * GROUP, lane, own + b * each + of->scales + g * of->codes);
        }
}

void pack_panels(int64_t format, const uint8_t *rows, int64_t count, int64_t inputs, uint8_t *to, int shared) {
    struct packing packing = {format, count, inputs, rows, to};
    for_each(round_up(count, LANES) / LANES, shared, is_grouped(format) ? pack_grouped_panel : pack_panel, &packing);
}

static float half_at(const uint8_t *from) {
    uint16_t bits;
    memcpy(&bits, from, 2);
    return half_to_float(bits);
}

/* The weight of input j of a block by the format's definition, rounded at most once. */
static float weight(int64_t format, int code, const uint8_t *scales, int lane, int j) {
    float d = half_at(scales + lane * 2);
    switch (format) {
        case Q4_0: return d * (float)(code - 8);
        case Q5_0: return d * (float)(code - 16);
        case Q8_0: return d * (float)(code - 128);
        case Q4_1: case Q5_1: return d * (float)code + half_at(scales + 32 + lane * 2);
        case Q6_K: return d * (float)(int8_t)scales[32 + j / 16 * LANES + lane] * (float)(code - SMALLEST_CODE);
        default: {
            float scale = d * scales[64 + j / 32 * LANES + lane];
            return scale * (float)code - half_at(scales + 32 + lane * 2) * scales[192 + j / 32 * LANES + lane];
        }
    }
}

/* Weights [count][inputs] of some outputs of a part. */
void unpack_rows(const struct block_part *part, int64_t inputs, const int64_t *outputs, int64_t count, float *to) {
    if (is_grouped(part->format)) {
        unpack_grouped(part, inputs, outputs, count, to);
        return;
    }
    const struct shape *of = &SHAPES[part->format];
    int64_t panel = panel_bytes(part->format, inputs), each = block_bytes(of);
    for (int64_t row = 0; row < count; row++) {
        const uint8_t *own = part->data + outputs[row] / LANES * panel;
        int lane = (int)(outputs[row] % LANES);
        for (int64_t i = 0; i < inputs; i++) {
            const uint8_t *scales = own + i / of->size * each;
            const uint8_t *codes = scales + of->scales + i % of->size / GROUP * of->codes;
            int code = code_at(part->format, codes, lane, (int)(i % GROUP));
            to[row * inputs + i] = weight(part->format, code, scales, lane, (int)(i % of->size));
        }
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

static int pack_piece(int file, const struct file_piece *piece) {
    int64_t row = piece->inputs / SHAPES[piece->format].size * SHAPES[piece->format].bytes;
    uint8_t *rows = malloc((size_t)(LANES * row));
    int packed = rows != NULL;
    for (int64_t at = 0; packed && at < piece->rows; at += LANES) {
        int64_t count = least(LANES, piece->rows - at);
        packed = read_whole(file, rows, count * row, piece->start + at * row);
        uint8_t *to = piece->to + at / LANES * panel_bytes(piece->format, piece->inputs);
        if (packed) pack_panels(piece->format, rows, count, piece->inputs, to, 0);
    }
    free(rows);
    return packed;
}

/* Packs the pieces that no thread has taken yet; `*next` is the first. To be called in every thread that shall help.
 * Touches nothing but the file and the pieces' own panels. Returns -1, or the number of a piece that the file does not
 * hold as a whole or for which there was no memory. */
int64_t pack_pieces(int32_t file, const struct file_piece *pieces, int64_t count, _Atomic int64_t *next) {
    for (int64_t number; (number = take(next)) < count;)
        if (!pack_piece(file, pieces + number)) return number;
    return -1;
}
#endif
