/* Exponential races (core/rng.py). Finds the tokens that can win, so that the others need no noise; the token that wins
 * for certain, which also saves computing the distribution; and the two leaders, with noise that is nearly exact. */
#include <math.h>
#include <stdint.h>
#include <string.h>

enum {
    AT_ONCE = 64,  /* tokens looked at together */
    BITS = 24,     /* bits of a random number that mostly decide */
    MOST = 1 << 20 /* tokens in a vocabulary up to which KEPT bounds the rounding of sums */
};
#define ROUNDING 1e-4             /* more than rounding can change the ratio of two speeds: see race_winner */
#define KEPT(tokens) (1e-4f+(tokens)*0x1.4p-27f) /* more than rounding can change a share of so many: see race_winner */
#define IMPOSSIBLE 1e-20f         /* more than the speed of any impossible token */

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

/* Writes, in order, the numbers of the tokens v whose speed probs[v] / E_v may be the greatest, given what rounding may
 * change, and returns how many there are: nearly always one. The noise E_v = -log(1 - u) lies between u and
 * u / (1 - u), and u in an interval of 1 / 2^BITS, so each speed has bounds: a token whose upper bound is below the
 * greatest lower bound so far cannot win. contenders: space for all tokens. */
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

/* -log(1 - u) for u between 2^-24 and 1 - 2^-24, with a relative error below 1e-6. */
static inline float fast_noise(float u) {
    float rest = 1 - u, mantissa;
    int32_t bits;
    memcpy(&bits, &rest, sizeof bits);
    int32_t halvings = (bits - 0x3F3504F3) >> 23; /* rest = mantissa * 2^halvings, mantissa from 0.71 to 1.41 */
    bits -= halvings * (1 << 23);
    memcpy(&mantissa, &bits, sizeof mantissa);
    float t = mantissa - 1 + (1 - rest - u); /* adds what rounding took from a small u */
    float s = t / (2 + t), square = s * s; /* log(1 + t) = 2 atanh(s) */
    float series = 1 + square * (1.0f / 3 + square * (0.2f + square * (1.0f / 7 + square * (1.0f / 9))));
    return -(2 * s * series + (float)halvings * 0.69314718f);
}

/* exp(x) for x from -80 to 0, with a relative error below 4e-6. */
static inline float fast_exp(float x) {
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

/* The greatest of all scores; NaN does not count. */
static inline float highest_score(const void *scores, int64_t is_bfloat16, int64_t tokens) {
    float highest[AT_ONCE], block[AT_ONCE], best = -INFINITY;
    for (int64_t i = 0; i < AT_ONCE; i++) highest[i] = best;
    for (int64_t start = 0; start < tokens; start += AT_ONCE) {
        int64_t count = tokens - start < AT_ONCE ? tokens - start : AT_ONCE;
        read_scores(scores, is_bfloat16, start, count, block);
        for (int64_t i = 0; i < count; i++) highest[i] = block[i] > highest[i] ? block[i] : highest[i];
    }
    for (int64_t i = 0; i < AT_ONCE; i++) best = fmaxf(best, highest[i]);
    return best;
}

/* True if top_k, top_p and min_p certainly keep a token, whatever the order of tokens with nearly equal probabilities.
 * probs: relative to the largest. */
static int32_t is_kept(const float *probs, int64_t tokens, int64_t token, int64_t top_k, float top_p, float min_p) {
    if (tokens > MOST) return 0;
    float least = probs[token] * (1 - (float)ROUNDING), sums[AT_ONCE] = {0}, sums_above[AT_ONCE] = {0};
    int32_t counts[AT_ONCE] = {0};
    for (int64_t start = 0; start < tokens; start += AT_ONCE) {
        int64_t count = tokens - start < AT_ONCE ? tokens - start : AT_ONCE;
        for (int64_t i = 0; i < count; i++) {
            float prob = probs[start + i];
            sums[i] += prob;
            sums_above[i] += prob >= least ? prob : 0;
            counts[i] += prob >= least;
        }
    }
    double sum = 0, above = 0;
    int64_t place = 0;
    for (int64_t i = 0; i < AT_ONCE; i++) sum += sums[i], above += sums_above[i], place += counts[i];
    if (top_k > 0 && place > top_k) return 0;
    if (top_k > 0) sum = above; /* top_p is a share of what top_k keeps, which is at least this */
    return (top_p >= 1 || above - probs[token] < (top_p - KEPT(tokens)) * sum) && least >= min_p;
}

/* The token that wins the race over softmax(scores / temperature), cut by top_k, top_p and min_p (0, 1 and 0 cut
 * nothing), as core/rng.py and sampling/warpers.py compute it; -1 if rounding could decide, if no token is possible or
 * if a score is NaN. The differences and quotients below are those of warpers.py to the bit. Relative errors:
 * exponentials below 4e-6 here and 3e-6 in PyTorch (20 units in the last place), noise and quotients of two speeds
 * below 1e-6, together less than a fifth of ROUNDING. A sum of n probabilities in l lanes is wrong by n / l / 2^24 at
 * most: in PyTorch's softmax (l >= 8) and twice here (l = 64), together n * 1.25 / 2^27, to which KEPT adds ROUNDING for
 * all else, the square of the former included. A winner has at least exp(-41) times the probability of the likeliest
 * token, because noise lies between 2^-54 and 17, so scores may be cut off at -80. probs, contenders: space for all
 * tokens. */
int64_t race_winner(const void *scores, int64_t is_bfloat16, int64_t tokens, uint64_t key, float temperature,
                    int64_t top_k, float top_p, float min_p, float *probs, int64_t *contenders) {
    float best = highest_score(scores, is_bfloat16, tokens);
    int32_t unclear = 0;
    for (int64_t start = 0; start < tokens; start += AT_ONCE) {
        int64_t count = tokens - start < AT_ONCE ? tokens - start : AT_ONCE;
        float *block = probs + start;
        read_scores(scores, is_bfloat16, start, count, block);
        for (int64_t i = 0; i < count; i++) {
            float score = (block[i] - best) / temperature;
            unclear |= score != score;
            block[i] = score > -80 ? score : -80;
        }
        for (int64_t i = 0; i < count; i++) block[i] = fast_exp(block[i]);
    }
    if (unclear || race_contenders(probs, tokens, key, contenders) != 1) return -1;
    if (!top_k && top_p >= 1 && !(min_p > 0)) return contenders[0];
    return is_kept(probs, tokens, contenders[0], top_k, top_p, min_p) ? contenders[0] : -1;
}

/* Writes the two tokens that lead in a race over softmax(scores / temperature), and their shares of all speeds; at
 * temperature 0 there is no noise and speeds are the softmax of the scores. Exact but for the last bits of a float.
 * ids: the token of each score; NULL for 0, 1, 2, ... */
void race_leaders(const void *scores, int64_t is_bfloat16, int64_t tokens, const int64_t *ids, float temperature,
                  uint64_t key, int64_t *leaders, float *shares) {
    float sums[AT_ONCE] = {0}, speeds[AT_ONCE], first = 0, second = 0;
    float best = highest_score(scores, is_bfloat16, tokens);
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
        for (int64_t i = 0; i < count; i++) speeds[i] = fast_exp(speeds[i]);
        for (int64_t i = 0; temperature > 0 && i < count; i++) {
            float u = ((float)(int32_t)(word(ids ? ids[start + i] : start + i, key) >> 41) + 0.5f) * 0x1p-23f;
            speeds[i] /= fast_noise(u);
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
    for (int i = 0; ids && i < 2; i++) leaders[i] = ids[leaders[i]];
    shares[0] = first > IMPOSSIBLE ? first / (float)sum : 0;
    shares[1] = second > IMPOSSIBLE ? second / (float)sum : 0;
}
