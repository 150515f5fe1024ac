/* Heads of tokens, rotated in the order in which they lie in memory, by vectors where the compiler has them. */

#include <math.h>

#include "tokens.h"

/* One head and where it goes, cos and sin of its pairs, and what its channels are multiplied by, if they are. */
typedef struct {
    const char *x;
    char *out;
    const float *cos, *sin, *weight;
    float scale;
} Head;

#if defined(__GNUC__) && defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define VECTORS
#define V 32
#define NAME(x) x##_32
#include "heads.h"
#define V 16
#define NAME(x) x##_16
#include "heads.h"
#endif

static ALWAYS_INLINE float load_bf16(const char *at) {
    uint16_t half;
    uint32_t bits;
    float value;
    memcpy(&half, at, 2);
    bits = (uint32_t)half << 16;
    memcpy(&value, &bits, 4);
    return value;
}

static ALWAYS_INLINE void store_bf16(char *at, float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits += 0x7FFFu + ((bits >> 16) & 1u); /* see ROUNDED in heads.h */
    uint16_t half = (uint16_t)(bits >> 16);
    memcpy(at, &half, 2);
}

static ALWAYS_INLINE float load(const char *at, int narrow) {
    float value;
    if (narrow) {
        return load_bf16(at);
    }
    memcpy(&value, at, 4);
    return value;
}

static ALWAYS_INLINE void store(char *at, float value, int narrow) {
    if (narrow) {
        store_bf16(at, value);
    } else {
        memcpy(at, &value, 4);
    }
}

/* Heads or tokens at equal distances, and the cos and sin of each. */
typedef struct {
    const char *x;
    char *out;
    const float *cos, *sin;
    int64_t count, from, to, phase; /* steps: bytes, bytes, elements */
    int64_t channels;
    const float *weight;
    float eps, *room;
} Rows;

/* Rotate the pairs of a head, of a kind that the compiler knows, so that it unrolls its own loop for each. */
static ALWAYS_INLINE void rotate_head(Head head, int64_t pairs, int adjacent, int narrow, int normed, int wide) {
    int64_t size = narrow ? 2 : 4, j = 0;
#ifdef VECTORS
    if (narrow && adjacent) {
        j = wide ? bf16_adjacent_32(head, j, pairs, normed) : 0;
        j = bf16_adjacent_16(head, j, pairs, normed);
    } else if (narrow) {
        j = wide ? bf16_half_32(head, j, pairs, normed) : 0;
        j = bf16_half_16(head, j, pairs, normed);
    } else if (adjacent) {
        j = fp32_adjacent(head, j, pairs, normed);
    } else {
        j = wide ? fp32_half_32(head, j, pairs, normed) : 0;
        j = fp32_half_16(head, j, pairs, normed);
    }
#endif
    for (; j < pairs; j++) {
        int64_t first = (adjacent ? 2 * j : j) * size, second = first + (adjacent ? 1 : pairs) * size;
        float a = load(head.x + first, narrow), b = load(head.x + second, narrow), cos = head.cos[j], sin = head.sin[j];
        if (normed) {
            a = a * head.scale * head.weight[j];
            b = b * head.scale * head.weight[j + pairs];
        }
        store(head.out + first, a * cos - b * sin, narrow);
        store(head.out + second, b * cos + a * sin, narrow);
    }
}

/* Normalise channels that do not turn; see weights_of for the order of their weights. */
static ALWAYS_INLINE void normalise(Head head, int64_t channels, int narrow, int wide) {
    int64_t pairs = channels / 2, size = narrow ? 2 : 4, c = 0;
#ifdef VECTORS
    if (narrow) {
        c = wide ? bf16_still_32(head, c, pairs) : 0;
        c = 2 * bf16_still_16(head, c, pairs);
    } else {
        c = wide ? fp32_still_32(head, c, channels) : 0;
        c = fp32_still_16(head, c, channels);
    }
#endif
    for (; c < channels; c++) {
        int64_t place = narrow && c < 2 * pairs ? c % 2 * pairs + c / 2 : c;
        store(head.out + c * size, load(head.x + c * size, narrow) * head.scale * head.weight[place], narrow);
    }
}

/* Add the upper half to the lower, until one number is left. */
static ALWAYS_INLINE float folded(float *sums, int64_t half) {
    for (; half > 0; half /= 2) {
        for (int64_t i = 0; i < half; i++) {
            sums[i] += sums[i + half];
        }
    }
    return sums[0];
}

/* The sum of squares of a head, in one order on every CPU: channel c goes to the partial sum of c mod 16; then those
 * of channels 8 apart are added, 4 apart, 2 apart and 1 apart. Partial sums of bfloat16 stand evens first. */
static ALWAYS_INLINE float sum_of_squares(const char *x, int64_t channels, int narrow, int wide) {
    float sums[16] = {0};
    int64_t c = 0;
#ifdef VECTORS
    if (narrow) {
        c = wide ? bf16_squares_32(x, channels, sums) : bf16_squares_16(x, channels, sums);
    } else {
        c = wide ? fp32_squares_32(x, channels, sums) : fp32_squares_16(x, channels, sums);
    }
#endif
    for (; c < channels; c++) {
        float value = load(x + c * (narrow ? 2 : 4), narrow);
        sums[narrow ? c % 2 * 8 + c % 16 / 2 : c % 16] += value * value;
    }
    return narrow ? folded(sums, 4) + folded(sums + 8, 4) : folded(sums, 8);
}

enum { SCALES = 16 }; /* heads whose scales are made at a time: they stay in the first cache */

/* 1 / sqrt(mean(x^2) + eps) of the first of rows: their roots take as long as one, since none waits for another. */
static ALWAYS_INLINE void scales_of(Rows rows, float *scales, int narrow, int wide) {
    int64_t count = rows.count < SCALES ? rows.count : SCALES;
    for (int64_t i = 0; i < count; i++, rows.x += rows.from) {
        scales[i] = sum_of_squares(rows.x, rows.channels, narrow, wide);
    }
    for (int64_t i = 0; i < count; i++) {
        scales[i] = 1.0f / sqrtf(scales[i] / (float)rows.channels + rows.eps);
    }
}

static ALWAYS_INLINE void rotate_as(Rows r, int64_t pairs, int adjacent, int narrow, int normed, int wide) {
    int64_t rotated = 2 * pairs * (narrow ? 2 : 4), rest = r.channels - 2 * pairs;
    float scales[SCALES];
    for (int64_t i = 0; r.count > 0; i++, r.count--, r.x += r.from, r.out += r.to, r.cos += r.phase, r.sin += r.phase) {
        Head head = {r.x, r.out, r.cos, r.sin, r.weight, 1.0f};
        if (normed) {
            if (i % SCALES == 0) {
                scales_of(r, scales, narrow, wide);
            }
            head.scale = scales[i % SCALES];
        }
        rotate_head(head, pairs, adjacent, narrow, normed, wide);
        if (normed) {
            Head other = {r.x + rotated, r.out + rotated, NULL, NULL, r.weight + 2 * pairs, head.scale};
            normalise(other, rest, narrow, wide);
        } else if (rest > 0 && r.x != r.out) {
            memmove(r.out + rotated, r.x + rotated, (size_t)(rest * (narrow ? 2 : 4)));
        }
    }
}

static ALWAYS_INLINE void rotate_rows(Rows rows, const Kind *kind, int normed, int wide) {
    if (kind->narrow && kind->adjacent) {
        rotate_as(rows, kind->pairs, 1, 1, normed, wide);
    } else if (kind->narrow) {
        rotate_as(rows, kind->pairs, 0, 1, normed, wide);
    } else if (kind->adjacent) {
        rotate_as(rows, kind->pairs, 1, 0, normed, wide);
    } else {
        rotate_as(rows, kind->pairs, 0, 0, normed, wide);
    }
}

/* Rotate heads as float32, then normalise them if they have weights, and round them once. */
static ALWAYS_INLINE void rotate_and_normalise(Rows r, const Kind *kind, int narrow, int wide) {
    int64_t size = narrow ? 2 : 4;
    for (; r.count > 0; r.count--, r.x += r.from, r.out += r.to, r.cos += r.phase, r.sin += r.phase) {
        Head head = {(const char *)r.room, (char *)r.room, r.cos, r.sin, NULL, 1.0f};
        for (int64_t c = 0; c < r.channels; c++) {
            r.room[c] = load(r.x + c * size, narrow);
        }
        rotate_head(head, kind->pairs, kind->adjacent, 0, 0, wide);
        float sum = r.weight == NULL ? 0 : sum_of_squares(head.x, r.channels, 0, wide);
        head.scale = 1.0f / sqrtf(sum / (float)r.channels + r.eps);
        for (int64_t c = 0; c < r.channels; c++) {
            float value = r.weight == NULL ? r.room[c] : r.room[c] * head.scale * r.weight[c];
            store(r.out + c * size, value, narrow);
        }
    }
}

static void rotate_plain(const Rows *rows, const Kind *kind) {
    if (kind->after) {
        kind->narrow ? rotate_and_normalise(*rows, kind, 1, 0) : rotate_and_normalise(*rows, kind, 0, 0);
        return;
    }
    rows->weight == NULL ? rotate_rows(*rows, kind, 0, 0) : rotate_rows(*rows, kind, 1, 0);
}

static WIDE void rotate_wide(const Rows *rows, const Kind *kind) {
    if (kind->after) {
        kind->narrow ? rotate_and_normalise(*rows, kind, 1, 1) : rotate_and_normalise(*rows, kind, 0, 1);
        return;
    }
    rows->weight == NULL ? rotate_rows(*rows, kind, 0, 1) : rotate_rows(*rows, kind, 1, 1);
}

void rotate_tokens(const Job *job, const Kind *kind, int64_t first, int64_t tokens, const float *cos,
                   const float *sin) {
    int64_t batch = first / job->shape[SEQ], place = first % job->shape[SEQ], heads = job->shape[HEADS];
    int by_head = job->to[SEQ] < job->to[HEADS];
    Rows rows = {job->x + batch * job->from[BATCH] + place * job->from[SEQ],
                 job->out + batch * job->to[BATCH] + place * job->to[SEQ],
                 cos,
                 sin,
                 heads,
                 job->from[HEADS],
                 job->to[HEADS],
                 0,
                 job->shape[CHANNELS],
                 job->weight,
                 job->eps,
                 job->room};
    if (by_head) {
        rows.count = tokens;
        rows.from = job->from[SEQ];
        rows.to = job->to[SEQ];
        rows.phase = kind->pairs;
    }
    for (int64_t i = 0; i < (by_head ? heads : tokens); i++) {
        (kind->wide ? rotate_wide : rotate_plain)(&rows, kind);
        rows.x += by_head ? job->from[HEADS] : job->from[SEQ];
        rows.out += by_head ? job->to[HEADS] : job->to[SEQ];
        rows.cos += by_head ? 0 : kind->pairs;
        rows.sin += by_head ? 0 : kind->pairs;
    }
}

void order_of(const Kind *kind, int64_t *order) {
    int64_t j = 0;
#ifdef VECTORS
    for (int64_t group = kind->wide ? 16 : 8; kind->narrow && !kind->after && !kind->adjacent && group >= 8;
         group /= 2) {
        for (; j + group <= kind->pairs; j += group) {
            for (int64_t i = 0; i < group / 2; i++) {
                order[j + i] = j + 2 * i;
                order[j + group / 2 + i] = j + 2 * i + 1;
            }
        }
    }
#endif
    for (; j < kind->pairs; j++) {
        order[j] = j;
    }
}

void weights_of(const Kind *kind, const int64_t *order, const char *given, int64_t channels, float *weight) {
    int64_t pairs = kind->pairs, still = (channels - 2 * pairs) / 2;
    for (int64_t c = 0; c < channels; c++) {
        int64_t rest = c - 2 * pairs, from = c;
        if (rest < 0) {
            int64_t pair = order[c % pairs], second = c >= pairs;
            from = kind->adjacent ? 2 * pair + second : pair + second * pairs;
        } else if (kind->narrow && !kind->after && rest < 2 * still) {
            from = 2 * pairs + rest % still * 2 + rest / still;
        }
        memcpy(&weight[c], given + 4 * from, 4);
        weight[c] = isnan(weight[c]) ? NAN : weight[c]; /* whose low bits are zeros, see ROUNDED in heads.h */
    }
}
