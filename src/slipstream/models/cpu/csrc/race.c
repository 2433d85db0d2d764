/* Which tokens can win an exponential race (core/rng.py), so that the others' noise need not be computed. */
#include <math.h>
#include <stdint.h>

enum { AT_ONCE = 64, BITS = 24 }; /* tokens looked at together; bits of a random number that mostly decide */
#define ROUNDING 1e-5             /* at most, of a speed */

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
