/* Rotate the channels of one head in float32, rounding once at the end. This file is included once per vector width,
 * with
 *
 *   V        bytes per vector
 *   NAME(x)  name of x for this width
 *
 * bfloat16 is the upper half of float32. A shift and a mask convert a word of two bfloat16 values to two floats and
 * back, so no lane ever moves. Therefore cos and sin for bfloat16 are stored with even pairs before odd pairs, in
 * groups of V / 2 pairs; see order_of in tokens.c. `out` may be `x`.
 *
 * Each function rotates whole vectors of pairs from j on, and returns the next pair. */

typedef float NAME(floats) __attribute__((vector_size(V)));
typedef uint32_t NAME(words) __attribute__((vector_size(V)));
#define LANES ((int64_t)(V / 4))
#define LOAD(variable, from) memcpy(&(variable), from, V)
#define STORE(to, variable) memcpy(to, &(variable), V)
#define LOW(word) ((NAME(floats))((word) << 16))
#define HIGH(word) ((NAME(floats))((word) & 0xFFFF0000u))
/* Round two floats to the nearest bfloat16, ties to even. A NaN stays a NaN because its low bits are zero and nothing
 * carries. */
#define UPPER(low, high) ((NAME(words))(low) >> 16 | ((NAME(words))(high) & 0xFFFF0000u))
/* With 64-byte vectors, a logic operation on three operands is one instruction. Round both numbers at once: truncate
 * them, and add 1 where the discarded bits exceed one half, or equal one half and the truncated number is odd. */
#if V == 64
typedef uint16_t NAME(halves) __attribute__((vector_size(V)));
#define LOWER(low, high) (((NAME(words))(low) & 0xFFFFu) | (NAME(words))(high) << 16)
#define IS_ODD(halves) ((halves) & 1)
#define PACK(to, low, high)                                                                          \
    do {                                                                                             \
        NAME(halves) upper = (NAME(halves))UPPER(low, high), lower = (NAME(halves))LOWER(low, high); \
        to = (NAME(words))(upper - (NAME(halves))((lower | IS_ODD(upper)) > 0x8000));                \
    } while (0)
#else
#define ROUNDED(bits) ((bits) + 0x7FFFu + (((bits) >> 16) & 1u))
#define PACK(to, low, high) to = UPPER(ROUNDED((NAME(words))(low)), ROUNDED((NAME(words))(high)))
#endif

static ALWAYS_INLINE int64_t NAME(bf16_half)(Head head, int64_t j, int64_t pairs) {
    for (; j + 2 * LANES <= pairs; j += 2 * LANES) {
        NAME(words) left, right;
        NAME(floats) c, s, d, t;
        LOAD(left, head.x + 2 * j);
        LOAD(right, head.x + 2 * (j + pairs));
        NAME(floats) a = LOW(left), b = LOW(right), e = HIGH(left), f = HIGH(right);
        LOAD(c, head.cos + j);
        LOAD(s, head.sin + j);
        LOAD(d, head.cos + j + LANES);
        LOAD(t, head.sin + j + LANES);
        PACK(left, a * c - b * s, e * d - f * t);
        PACK(right, b * c + a * s, f * d + e * t);
        STORE(head.out + 2 * j, left);
        STORE(head.out + 2 * (j + pairs), right);
    }
    return j;
}

static ALWAYS_INLINE int64_t NAME(bf16_adjacent)(Head head, int64_t j, int64_t pairs) {
    for (; j + LANES <= pairs; j += LANES) {
        NAME(words) both;
        NAME(floats) c, s;
        LOAD(both, head.x + 4 * j);
        NAME(floats) a = LOW(both), b = HIGH(both);
        LOAD(c, head.cos + j);
        LOAD(s, head.sin + j);
        PACK(both, a * c - b * s, b * c + a * s);
        STORE(head.out + 4 * j, both);
    }
    return j;
}

static ALWAYS_INLINE int64_t NAME(fp32_half)(Head head, int64_t j, int64_t pairs) {
    for (; j + LANES <= pairs; j += LANES) {
        NAME(floats) a, b, c, s, left, right;
        LOAD(a, head.x + 4 * j);
        LOAD(b, head.x + 4 * (j + pairs));
        LOAD(c, head.cos + j);
        LOAD(s, head.sin + j);
        left = a * c - b * s;
        right = b * c + a * s;
        STORE(head.out + 4 * j, left);
        STORE(head.out + 4 * (j + pairs), right);
    }
    return j;
}

/* Add the squares of all whole groups of sixteen channels to sixteen partial sums; return the next channel. */
static ALWAYS_INLINE int64_t NAME(fp32_squares)(const char *x, int64_t channels, float *sums) {
    NAME(floats) all[16 / LANES] = {0};
    int64_t c = 0;
    for (; c + 16 <= channels; c += 16) {
        for (int64_t i = 0; i < 16 / LANES; i++) {
            NAME(floats) a;
            LOAD(a, x + 4 * c + V * i);
            all[i] += a * a;
        }
    }
    memcpy(sums, all, sizeof all);
    return c;
}

#if V == 16
/* Select four elements from two vectors by index; 4 to 7 select from the second vector. */
#ifdef __clang__
#define PICK(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define PICK(a, b, i, j, k, l) __builtin_shuffle(a, b, (words_16){i, j, k, l})
#endif

static ALWAYS_INLINE int64_t fp32_adjacent(Head head, int64_t j, int64_t pairs) {
    for (; j + 4 <= pairs; j += 4) {
        floats_16 low, high, c, s;
        LOAD(low, head.x + 8 * j);
        LOAD(high, head.x + 8 * j + 16);
        LOAD(c, head.cos + j);
        LOAD(s, head.sin + j);
        floats_16 a = PICK(low, high, 0, 2, 4, 6), b = PICK(low, high, 1, 3, 5, 7);
        floats_16 left = a * c - b * s, right = b * c + a * s;
        low = PICK(left, right, 0, 4, 1, 5);
        high = PICK(left, right, 2, 6, 3, 7);
        STORE(head.out + 8 * j, low);
        STORE(head.out + 8 * j + 16, high);
    }
    return j;
}
#undef PICK
#endif

#undef LANES
#undef LOAD
#undef STORE
#undef LOW
#undef HIGH
#undef UPPER
#undef LOWER
#undef IS_ODD
#undef ROUNDED
#undef PACK
#undef NAME
#undef V
