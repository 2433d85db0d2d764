/* Activations as integers: 32 of a token share a scale, its largest magnitude over 127 (int8) or 16319 (int15).
 *
 * An integer of two planes is 128 times the first plus the second, which lies in -64 to 63. A tile begins behind the
 * bytes of all tokens before it, see `bytes_before`. Within it the groups of 32 inputs follow each other, see
 * `group_bytes` and, for a tile in rows, `tile_group_bytes`. The sums that products begin with are minus the sum of each
 * half times 32, and minus the sum of the integers times 8, 16 and 128: codes are shifted by as much.
 */
#include "../bfloat16.h"
#include "blocks.h"

static const float SMALLEST = 1e-30f; /* magnitudes up to this count as 0: the inverse would be infinite */

#ifdef __AMX_INT8__
enum { HAS_ROWS = 1 };
#else
enum { HAS_ROWS = 0 };
#endif
enum { MOST = 16 /* tokens of a tile in rows */, SOME = 8 /* tokens; up to this many, tiles in words are as fast */ };

struct tiling tiling_of(int64_t tokens, int64_t planes) {
    if (!HAS_ROWS || planes > 1 || tokens <= SOME) return (struct tiling){TILE, planes, 0};
    int64_t tiles = round_up(tokens, MOST) / MOST; /* of equal size, so that little is computed in vain */
    return (struct tiling){round_up(round_up(tokens, tiles) / tiles, 4), planes, 1};
}

int64_t bytes_before(const struct tiling *of, int64_t inputs, int64_t token) {
    return inputs / GROUP * (of->in_rows ? tile_group_bytes(token) : group_bytes(of->planes, token));
}

int64_t activation_bytes(int64_t inputs, int64_t tokens, int64_t planes) {
    struct tiling tiling = tiling_of(tokens, planes);
    if (tiling.in_rows) return bytes_before(&tiling, inputs, round_up(tokens, tiling.tokens));
    int64_t whole = tokens / TILE * TILE, rest = tokens - whole;
    return bytes_before(&tiling, inputs, whole) + bytes_before(&tiling, inputs, rest ? places(rest) : 0);
}

static inline floats numbers_at(struct numbers x, int64_t i) {
    return x.floats ? load_floats(x.floats + i) : load_bf16(x.halves + i);
}

void quantize_group(struct numbers x, int64_t first, const struct tiling *of, int place, int count, uint8_t *to) {
    int64_t planes = of->planes;
    floats parts[2] = {numbers_at(x, first), numbers_at(x, first + LANES)};
    float most = largest_magnitude(parts[0], parts[1]), top = planes == 1 ? LARGEST_INT8 : LARGEST_INT15;
    if (!(most < INFINITY)) parts[0] = parts[1] = all_floats(0), most = NAN; /* as a scale, it makes every sum NaN */
    floats times = all_floats(most > SMALLEST ? top / most : 0);
    int32_t sums[2];
    for (int half = 0; half < 2; half++) {
        ints whole = to_ints(multiply_floats(parts[half], times)), first = whole;
        uint8_t narrow[2][LANES];
        sums[half] = int_sum(whole);
        if (planes == 2) {
            first = over_128(add_ints(whole, all_ints(64)));
            store_narrow(narrow[1], subtract_ints(whole, times_128(first)));
        }
        store_narrow(narrow[0], first);
        if (of->in_rows) memcpy(to + place * GROUP + half * LANES, narrow[0], LANES);
        for (int v = 0; v < 4 && !of->in_rows; v++)
            for (int p = 0; p < planes; p++)
                memcpy(to + (((half * 4 + v) * planes + p) * count + place) * 4, narrow[p] + v * 4, 4);
    }
    uint8_t *marks = to + 32 * planes * count + place * 4;
    int32_t all = sums[0] + sums[1];
    float scale = most / top, total = scale * (float)all;
    int32_t begins[MARKS] = {
        [BEGIN_LOW] = -32 * sums[0], [BEGIN_HIGH] = -32 * sums[1],
        [BEGIN_8] = -8 * all, [BEGIN_16] = -16 * all, [BEGIN_128] = -128 * all,
    };
    memcpy(begins + SCALE, &scale, 4), memcpy(begins + TOTAL, &total, 4);
    for (int i = 0; i < (of->in_rows ? BEGIN_8 : MARKS); i++) memcpy(marks + i * count * 4, &begins[i], 4);
}

void quantize_groups(struct numbers x, int64_t inputs, int64_t tokens, const struct tiling *of, int64_t first_group,
                     int64_t end, uint8_t *to) {
    static const float none[GROUP] = {0};
    for (int64_t done = 0; done < tokens; done += of->tokens) {
        int64_t rows = least(of->tokens, tokens - done), count = of->in_rows ? of->tokens : places(rows);
        int64_t bytes = of->in_rows ? tile_group_bytes(count) : group_bytes(of->planes, count);
        uint8_t *tile = to + bytes_before(of, inputs, done);
        for (int64_t g = first_group; g < end; g++)
            for (int64_t place = 0; place < count; place++) {
                struct numbers from = place < rows ? x : (struct numbers){none, NULL};
                int64_t first = place < rows ? (done + place) * inputs + g * GROUP : 0;
                quantize_group(from, first, of, (int)place, (int)count, tile + g * bytes);
            }
    }
}

void quantize(const struct member *me, struct numbers x, int64_t inputs, int64_t tokens, const struct tiling *of,
              uint8_t *to) {
    int64_t groups = inputs / GROUP; /* tokens share lines of memory, threads do not */
    quantize_groups(x, inputs, tokens, of, share_of(me, groups, me->number), share_of(me, groups, me->number + 1), to);
    wait_for_team(me);
}

void gather(const struct member *me, const uint8_t *from, int64_t inputs, const struct token_row *rows, int64_t count,
            const struct tiling *of, uint8_t *to) {
    int64_t groups = inputs / GROUP, end = share_of(me, groups, me->number + 1), each = group_bytes(of->planes, 1);
    for (int64_t done = 0; done < count; done += of->tokens) {
        int64_t there = least(of->tokens, count - done), all = of->in_rows ? of->tokens : places(there);
        int64_t bytes = of->in_rows ? tile_group_bytes(all) : group_bytes(of->planes, all);
        uint8_t *tile = to + bytes_before(of, inputs, done);
        for (int64_t g = share_of(me, groups, me->number); g < end; g++) {
            uint8_t *group = tile + g * bytes;
            if (there < all) memset(group, 0, (size_t)bytes);
            for (int64_t i = 0; i < there; i++) {
                const uint8_t *own = from + (rows[done + i].token * groups + g) * each;
                if (of->in_rows) {
                    memcpy(group + i * GROUP, own, GROUP);
                    for (int mark = 0; mark < BEGIN_8; mark++)
                        memcpy(group + (GROUP + 4 * mark) * all + i * 4, own + GROUP + 4 * mark, 4);
                    continue;
                }
                for (int64_t word = 0; word < each / 4; word++) memcpy(group + (word * all + i) * 4, own + word * 4, 4);
            }
        }
    }
}
