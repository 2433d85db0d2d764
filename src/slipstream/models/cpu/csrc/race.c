/* Exponential races (core/rng.py): which tokens can win, so that the others' noise need not be computed, and which are
 * ahead, with noise that is nearly right. */
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { AT_ONCE = 64, BITS = 24 }; /* tokens looked at together; bits of a random number that mostly decide */
#define ROUNDING 1e-5             /* at most, of a speed */
#define IMPOSSIBLE 1e-20f         /* more than the speed of any token that is not possible */

static inline uint64_t word(int64_t token, uint64_t key) { /* SplitMix64, as core/rng.py has it */
    uint64_t z = (uint64_t)(token + 1) * 0x9E3779B97F4A7C15u + key;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static inline double speed(const float *probs, int64_t token, uint64_t key) {
    float u = (float)((word(token, key) >> 11) + 0.5) * 0x1p-53f;
    return probs[token] / -log1p(-fminf(u, 1 - 0x1p-24f));
}

/* Writes the numbers of the tokens whose probs[v] / E_v may be the greatest but for rounding, in order, and returns how
 * many: nearly always one. The noise E_v = -log(1 - u) lies between u and u / (1 - u), and u in an interval of
 * 1 / 2^BITS: the token whose speed is the greatest for certain so far excludes those that are slower at their fastest.
 * contenders: space for all tokens. */
int64_t race_contenders(const float *probs, int64_t tokens, uint64_t key, int64_t *contenders) {
    const float step = 1.0f / (1 << BITS);
    int64_t found = 0, kept = 0;
    float fastest = 0;
    for (int64_t first = 0; first < tokens; first += AT_ONCE) {
        int64_t count = tokens - first < AT_ONCE ? tokens - first : AT_ONCE;
        float least[AT_ONCE];
        int32_t any = 0;
        for (int64_t i = 0; i < count; i++) {
            least[i] = (float)(int32_t)(word(first + i, key) >> (64 - BITS)) * step;
            any |= probs[first + i] >= fastest * least[i];
        }
        for (int64_t i = 0; any && i < count; i++) {
            float prob = probs[first + i];
            if (!(prob > 0 && prob >= fastest * least[i])) continue;
            contenders[found++] = first + i;
            float most = least[i] + step, slowest = most < 1 ? 0.999f * prob * (1 - most) / most : 0;
            if (slowest > fastest) fastest = slowest;
        }
    }
    double best = 0;
    for (int64_t i = 0; i < found; i++) best = fmax(best, speed(probs, contenders[i], key));
    for (int64_t i = 0; i < found; i++)
        if (speed(probs, contenders[i], key) >= best * (1 - ROUNDING)) contenders[kept++] = contenders[i];
    return kept;
}

/* -log(1 - u) of u between 2^-24 and 1 - 2^-24, within 1e-6 of it. */
static inline float exponential(float u) {
    float rest = 1 - u, mantissa;
    int32_t bits;
    memcpy(&bits, &rest, sizeof bits);
    int32_t halvings = (bits - 0x3F3504F3) >> 23; /* rest = mantissa * 2^halvings, mantissa from 0.71 to 1.41 */
    bits -= halvings * (1 << 23);
    memcpy(&mantissa, &bits, sizeof mantissa);
    float t = mantissa - 1 + (1 - rest - u); /* what rounding took from a small u */
    float s = t / (2 + t), square = s * s; /* log(1 + t) = 2 atanh(s) */
    float series = 1 + square * (1.0f / 3 + square * (0.2f + square * (1.0f / 7 + square * (1.0f / 9))));
    return -(2 * s * series + (float)halvings * 0.69314718f);
}

/* exp(x) of x from -80 to 0; the error is below 4e-6 of it. */
static inline float power(float x) {
    float turns = (float)(int32_t)(x * 1.44269504f - 0.5f), rest = x - turns * 0.693359375f + turns * 2.12194440e-4f;
    float series = 1 + rest * (1 + rest * (0.5f + rest * (1.0f / 6 + rest * (1.0f / 24 + rest * (1.0f / 120)))));
    int32_t bits = ((int32_t)turns + 127) * (1 << 23);
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return series * scale;
}

static inline void read_scores(const void *scores, int64_t is_bfloat16, int64_t first, int64_t count, float *out) {
    if (!is_bfloat16) {
        memcpy(out, (const float *)scores + first, count * sizeof *out);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)((const uint16_t *)scores)[first + i] << 16;
        memcpy(out + i, &bits, sizeof bits);
    }
}

/* Writes the two tokens that lead in a race over softmax(scores / temperature), and their shares of all speeds; at
 * temperature 0 there is no noise and speeds are the softmax of the scores. Right but for the last bits of a float. */
void race_leaders(const void *scores, int64_t is_bfloat16, int64_t tokens, float temperature, uint64_t key,
                  int64_t *leaders, float *shares) {
    float highest[AT_ONCE], sums[AT_ONCE] = {0}, speeds[AT_ONCE], first = 0, second = 0, best = -INFINITY;
    for (int64_t i = 0; i < AT_ONCE; i++) highest[i] = best;
    for (int64_t start = 0; start < tokens; start += AT_ONCE) {
        int64_t count = tokens - start < AT_ONCE ? tokens - start : AT_ONCE;
        read_scores(scores, is_bfloat16, start, count, speeds);
        for (int64_t i = 0; i < count; i++) highest[i] = speeds[i] > highest[i] ? speeds[i] : highest[i];
    }
    for (int64_t i = 0; i < AT_ONCE; i++) best = fmaxf(best, highest[i]);
    if (best == -INFINITY) best = 0; /* no token is possible */
    float rate = temperature > 0 ? 1 / fmaxf(temperature, 1e-30f) : 1;
    leaders[0] = leaders[1] = 0;
    for (int64_t start = 0; start < tokens; start += AT_ONCE) {
        int64_t count = tokens - start < AT_ONCE ? tokens - start : AT_ONCE;
        int32_t any = 0;
        read_scores(scores, is_bfloat16, start, count, speeds);
        for (int64_t i = 0; i < count; i++) {
            float score = (speeds[i] - best) * rate;
            speeds[i] = score > -80 ? score : -80; /* NaN becomes -80, too */
        }
        for (int64_t i = 0; i < count; i++) speeds[i] = power(speeds[i]);
        for (int64_t i = 0; temperature > 0 && i < count; i++) {
            float u = ((float)(int32_t)(word(start + i, key) >> 41) + 0.5f) * 0x1p-23f;
            speeds[i] /= exponential(u);
        }
        for (int64_t i = 0; i < count; i++) any |= speeds[i] > second;
        for (int64_t i = 0; i < count; i++) sums[i] += speeds[i];
        for (int64_t i = 0; any && i < count; i++) {
            if (speeds[i] > first) {
                second = first, leaders[1] = leaders[0];
                first = speeds[i], leaders[0] = start + i;
            } else if (speeds[i] > second) {
                second = speeds[i], leaders[1] = start + i;
            }
        }
    }
    double sum = 0;
    for (int64_t i = 0; i < AT_ONCE; i++) sum += sums[i];
    shares[0] = first > IMPOSSIBLE ? first / (float)sum : 0;
    shares[1] = second > IMPOSSIBLE ? second / (float)sum : 0;
}
