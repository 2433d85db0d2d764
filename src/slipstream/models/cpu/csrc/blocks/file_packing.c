/* Rows of a file to panels, in memory of a few rows that stays in the processor's cache. By functions of POSIX. */
#include "blocks.h"

#ifndef _WIN32
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

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

/* Packs the pieces that no thread has taken yet, `*next` being the first: call it in as many threads as shall work.
 * Nothing but the file and the pieces' own panels is touched. Returns -1, or the number of a piece that the file does
 * not hold whole or for which there was no memory. */
int64_t pack_pieces(int32_t file, const struct file_piece *pieces, int64_t count, _Atomic int64_t *next) {
    for (int64_t number; (number = take(next)) < count;)
        if (!pack_piece(file, pieces + number)) return number;
    return -1;
}
#endif
