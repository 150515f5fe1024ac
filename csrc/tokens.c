/* Heads of tokens, rotated in the order in which they lie in memory, by vectors where the compiler has them. */

#include "tokens.h"

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

/* Heads or tokens at equal distances, and the cos and sin of each. */
typedef struct {
    const char *x;
    char *out;
    const float *cos, *sin;
    int64_t count, from, to, phase; /* steps: bytes, bytes, elements */
    int64_t rest;                   /* bytes behind the rotated channels */
} Rows;

static ALWAYS_INLINE void rotate_pair(const char *x, char *out, int64_t first, int64_t second, float cos, float sin,
                                      int narrow) {
    float a, b;
    if (narrow) {
        a = load_bf16(x + first);
        b = load_bf16(x + second);
        store_bf16(out + first, a * cos - b * sin);
        store_bf16(out + second, b * cos + a * sin);
    } else {
        memcpy(&a, x + first, 4);
        memcpy(&b, x + second, 4);
        float left = a * cos - b * sin, right = b * cos + a * sin;
        memcpy(out + first, &left, 4);
        memcpy(out + second, &right, 4);
    }
}

/* Rotate rows of a kind that the compiler knows, so that it unrolls its own loop for each. */
static ALWAYS_INLINE void rotate_as(Rows r, int64_t pairs, int adjacent, int narrow, int wide) {
    int64_t size = narrow ? 2 : 4, rotated = 2 * pairs * size;
    for (; r.count > 0; r.count--, r.x += r.from, r.out += r.to, r.cos += r.phase, r.sin += r.phase) {
        int64_t j = 0;
#ifdef VECTORS
        if (narrow && adjacent) {
            j = wide ? bf16_adjacent_32(r.x, r.out, r.cos, r.sin, j, pairs) : 0;
            j = bf16_adjacent_16(r.x, r.out, r.cos, r.sin, j, pairs);
        } else if (narrow) {
            j = wide ? bf16_half_32(r.x, r.out, r.cos, r.sin, j, pairs) : 0;
            j = bf16_half_16(r.x, r.out, r.cos, r.sin, j, pairs);
        } else if (adjacent) {
            j = fp32_adjacent(r.x, r.out, r.cos, r.sin, j, pairs);
        } else {
            j = fp32_half_16(r.x, r.out, r.cos, r.sin, j, pairs);
        }
#endif
        for (; j < pairs; j++) {
            int64_t first = (adjacent ? 2 * j : j) * size, second = first + (adjacent ? 1 : pairs) * size;
            rotate_pair(r.x, r.out, first, second, r.cos[j], r.sin[j], narrow);
        }
        if (r.rest > 0 && r.x != r.out) {
            memmove(r.out + rotated, r.x + rotated, (size_t)r.rest);
        }
    }
}

static ALWAYS_INLINE void rotate_rows(Rows rows, const Kind *kind, int wide) {
    if (kind->narrow && kind->adjacent) {
        rotate_as(rows, kind->pairs, 1, 1, wide);
    } else if (kind->narrow) {
        rotate_as(rows, kind->pairs, 0, 1, wide);
    } else if (kind->adjacent) {
        rotate_as(rows, kind->pairs, 1, 0, wide);
    } else {
        rotate_as(rows, kind->pairs, 0, 0, wide);
    }
}

static void rotate_plain(const Rows *rows, const Kind *kind) { rotate_rows(*rows, kind, 0); }

static WIDE void rotate_wide(const Rows *rows, const Kind *kind) { rotate_rows(*rows, kind, 1); }

void rotate_tokens(const Job *job, const Kind *kind, int64_t first, int64_t tokens, const float *cos,
                   const float *sin) {
    int64_t batch = first / job->shape[SEQ], place = first % job->shape[SEQ], heads = job->shape[HEADS];
    int64_t size = kind->narrow ? 2 : 4, rest = (job->shape[CHANNELS] - 2 * kind->pairs) * size;
    int by_head = job->to[SEQ] < job->to[HEADS];
    Rows rows = {job->x + batch * job->from[BATCH] + place * job->from[SEQ],
                 job->out + batch * job->to[BATCH] + place * job->to[SEQ],
                 cos,
                 sin,
                 heads,
                 job->from[HEADS],
                 job->to[HEADS],
                 0,
                 rest};
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
    for (int64_t group = kind->wide ? 16 : 8; kind->narrow && !kind->adjacent && group >= 8; group /= 2) {
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
