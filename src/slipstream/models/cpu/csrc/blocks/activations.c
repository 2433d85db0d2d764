/* Activations as integers: 32 of a token share a scale, its largest magnitude over 127 (int8) or 16319 (int15).
 *
 * An integer of two planes is 128 times the first plus the second, which lies in -64 to 63. A tile of n places stands at
 * the tokens before it times the bytes of a token; within it, 32 inputs after another, see `group_bytes`. The sums that
 * products begin with are minus the sum of the integers times 8, 16 and 128, and of both halves times 32: codes are
 * shifted by as much.
 */
#include "blocks.h"

static const float SMALLEST = 1e-30f; /* of a magnitude that is not taken for 0, whose inverse would be infinite */

int64_t activation_bytes(int64_t inputs, int64_t tokens, int64_t planes) {
    int64_t whole = tokens / TILE * TILE, rest = tokens - whole;
    return inputs / GROUP * (group_bytes(planes, whole) + group_bytes(planes, rest ? places(rest) : 0));
}

/* 32 inputs of a token at its place in a tile of `count`. */
static void quantise_group(const float *x, int64_t planes, int place, int count, uint8_t *to) {
    floats parts[2] = {load_floats(x), load_floats(x + LANES)};
    float most = largest_magnitude(parts[0], parts[1]), top = planes == 1 ? LARGEST_INT8 : LARGEST_INT15;
    if (!(most < INFINITY)) parts[0] = parts[1] = all_floats(0), most = NAN; /* what it is part of is no number */
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
        for (int v = 0; v < 4; v++)
            for (int p = 0; p < planes; p++)
                memcpy(to + (((half * 4 + v) * planes + p) * count + place) * 4, narrow[p] + v * 4, 4);
    }
    uint8_t *marks = to + 32 * planes * count + place * 4;
    int32_t all = sums[0] + sums[1];
    float scale = most / top, total = scale * (float)all;
    int32_t begins[5] = {-8 * all, -16 * all, -128 * all, -SMALLEST_CODE * sums[0], -SMALLEST_CODE * sums[1]};
    memcpy(marks, &scale, 4);
    memcpy(marks + count * 4, &total, 4);
    for (int i = 0; i < 5; i++) memcpy(marks + (2 + i) * count * 4, &begins[i], 4);
}

void quantise(const struct member *me, const float *x, int64_t inputs, int64_t tokens, int64_t planes, uint8_t *to) {
    static const float none[GROUP] = {0};
    int64_t groups = inputs / GROUP, end = share_of(me, groups, me->number + 1);
    for (int64_t done = 0; done < tokens; done += TILE) {
        int64_t rows = least(TILE, tokens - done), count = places(rows);
        uint8_t *tile = to + done * groups * group_bytes(planes, 1);
        for (int64_t g = share_of(me, groups, me->number); g < end; g++) /* tokens share lines of memory, threads do not */
            for (int64_t place = 0; place < count; place++) {
                const float *from = place < rows ? x + (done + place) * inputs + g * GROUP : none;
                quantise_group(from, planes, (int)place, (int)count, tile + g * group_bytes(planes, count));
            }
    }
    wait_for_team(me);
}
