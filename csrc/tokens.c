/* Rotate the heads of tokens in memory order, with vectors if the compiler supports them. */

#include <math.h>

#include "tokens.h"

/* A head, its destination, and the cos and sin of its pairs. */
typedef struct {
    const char *x;
    char *out;
    const float *cos, *sin;
} Head;

#if defined(__GNUC__) && defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define VECTORS
#define V 64
#define NAME(x) x##_64
#include "heads.h"
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

/* Heads or tokens at equal distances, and their cos and sin. */
typedef struct {
    const char *x;
    char *out;
    const float *cos, *sin;
    int64_t count, from, to, phase; /* steps in bytes, bytes, elements */
    int64_t channels;
    const float *weight;
    float eps, *room;
} Rows;

/* Rotate the pairs of a head; the last three arguments are constants, so that each kind has its own unrolled loop. */
static ALWAYS_INLINE void rotate_head(Head head, int64_t pairs, int adjacent, int narrow, int vectors) {
    int64_t size = narrow ? 2 : 4, j = 0;
#ifdef VECTORS
    if (narrow && adjacent) {
        j = vectors >= LONGEST ? bf16_adjacent_64(head, j, pairs) : j;
        j = vectors >= LONG ? bf16_adjacent_32(head, j, pairs) : j;
        j = bf16_adjacent_16(head, j, pairs);
    } else if (narrow) {
        j = vectors >= LONGEST ? bf16_half_64(head, j, pairs) : j;
        j = vectors >= LONG ? bf16_half_32(head, j, pairs) : j;
        j = bf16_half_16(head, j, pairs);
    } else if (adjacent) {
        j = fp32_adjacent(head, j, pairs);
    } else {
        j = vectors >= LONGEST ? fp32_half_64(head, j, pairs) : j;
        j = vectors >= LONG ? fp32_half_32(head, j, pairs) : j;
        j = fp32_half_16(head, j, pairs);
    }
#endif
    for (; j < pairs; j++) {
        int64_t first = (adjacent ? 2 * j : j) * size, second = first + (adjacent ? 1 : pairs) * size;
        float a = load(head.x + first, narrow), b = load(head.x + second, narrow), cos = head.cos[j], sin = head.sin[j];
        store(head.out + first, a * cos - b * sin, narrow);
        store(head.out + second, b * cos + a * sin, narrow);
    }
}

/* Add the upper half to the lower half repeatedly until one number is left. */
static ALWAYS_INLINE float folded(float *sums, int64_t half) {
    for (; half > 0; half /= 2) {
        for (int64_t i = 0; i < half; i++) {
            sums[i] += sums[i + half];
        }
    }
    return sums[0];
}

/* Multiply a head by 1 / sqrt(mean(x^2) + eps) and by weights. Squares are added in the same order on every CPU:
 * channel c is added to partial sum c mod 16, then partial sums that are 8, 4, 2 and 1 apart are added. */
static ALWAYS_INLINE void normalise(float *x, int64_t channels, float eps, const float *weight, int vectors) {
    float sums[16] = {0};
    int64_t c = 0;
#ifdef VECTORS
    c = vectors == LONGEST ? fp32_squares_64((const char *)x, channels, sums)
        : vectors == LONG  ? fp32_squares_32((const char *)x, channels, sums)
                           : fp32_squares_16((const char *)x, channels, sums);
#endif
    for (; c < channels; c++) {
        sums[c % 16] += x[c] * x[c];
    }
    float scale = 1.0f / sqrtf(folded(sums, 8) / (float)channels + eps);
    for (c = 0; c < channels; c++) {
        x[c] = x[c] * scale * weight[c];
    }
}

static ALWAYS_INLINE void rotate_as(Rows r, int64_t pairs, int adjacent, int narrow, int vectors) {
    int64_t rotated = 2 * pairs * (narrow ? 2 : 4), rest = r.channels - 2 * pairs;
    for (; r.count > 0; r.count--, r.x += r.from, r.out += r.to, r.cos += r.phase, r.sin += r.phase) {
        Head head = {r.x, r.out, r.cos, r.sin};
        rotate_head(head, pairs, adjacent, narrow, vectors);
        if (rest > 0 && r.x != r.out) {
            memmove(r.out + rotated, r.x + rotated, (size_t)(rest * (narrow ? 2 : 4)));
        }
    }
}

/* Rotate heads in float32, normalise those with weights before or after, and round once. */
static ALWAYS_INLINE void rotate_normed(Rows r, const Kind *kind, int narrow, int vectors) {
    int64_t size = narrow ? 2 : 4, channels = r.channels;
    for (; r.count > 0; r.count--, r.x += r.from, r.out += r.to, r.cos += r.phase, r.sin += r.phase) {
        Head head = {(const char *)r.room, (char *)r.room, r.cos, r.sin};
        for (int64_t c = 0; c < channels; c++) {
            r.room[c] = load(r.x + c * size, narrow);
        }
        if (r.weight != NULL && !kind->after) {
            normalise(r.room, channels, r.eps, r.weight, vectors);
        }
        rotate_head(head, kind->pairs, kind->adjacent, 0, vectors);
        if (r.weight != NULL && kind->after) {
            normalise(r.room, channels, r.eps, r.weight, vectors);
        }
        for (int64_t c = 0; c < channels; c++) {
            store(r.out + c * size, r.room[c], narrow);
        }
    }
}

static ALWAYS_INLINE void rotate_rows(Rows rows, const Kind *kind, int vectors) {
    if (kind->normed) {
        kind->narrow ? rotate_normed(rows, kind, 1, vectors) : rotate_normed(rows, kind, 0, vectors);
    } else if (kind->narrow && kind->adjacent) {
        rotate_as(rows, kind->pairs, 1, 1, vectors);
    } else if (kind->narrow) {
        rotate_as(rows, kind->pairs, 0, 1, vectors);
    } else if (kind->adjacent) {
        rotate_as(rows, kind->pairs, 1, 0, vectors);
    } else {
        rotate_as(rows, kind->pairs, 0, 0, vectors);
    }
}

static void rotate_short(const Rows *rows, const Kind *kind) { rotate_rows(*rows, kind, SHORT); }

static WIDE void rotate_long(const Rows *rows, const Kind *kind) { rotate_rows(*rows, kind, LONG); }

static WIDEST void rotate_longest(const Rows *rows, const Kind *kind) { rotate_rows(*rows, kind, LONGEST); }

void rotate_tokens(const Job *job, const Kind *kind, int64_t first, int64_t tokens, const float *cos,
                   const float *sin) {
    int64_t batch = first / job->shape[SEQ], place = first % job->shape[SEQ], heads = job->shape[HEADS];
    int by_head = job->to[SEQ] < job->to[HEADS];
    void (*const rotate[])(const Rows *, const Kind *) = {rotate_short, rotate_long, rotate_longest};
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
        rotate[kind->vectors](&rows, kind);
        rows.x += by_head ? job->from[HEADS] : job->from[SEQ];
        rows.out += by_head ? job->to[HEADS] : job->to[SEQ];
        rows.cos += by_head ? 0 : kind->pairs;
        rows.sin += by_head ? 0 : kind->pairs;
    }
}

void order_of(const Kind *kind, int64_t *order) {
    int64_t j = 0;
#ifdef VECTORS
    for (int64_t group = 8 << kind->vectors; kind->narrow && !kind->normed && !kind->adjacent && group >= 8;
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
