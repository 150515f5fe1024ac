/* Pairs of one head, rotated: float32 arithmetic, one rounding at the end. Included once per width of vectors, with
 *
 *   V        bytes of a vector
 *   NAME(x)  the name x has for this width
 *
 * bfloat16 is the upper half of float32. A word of two of them becomes two floats by a shift and by a mask, and two
 * floats a word again likewise: no lane ever moves. For that, cos and sin of halves stand evens first, then odds, in
 * groups of V / 2 pairs; see order_of in rotate.c. x may be out.
 *
 * Each function rotates whole vectors of pairs from j on, and returns the pair it has come to. */

typedef float NAME(floats) __attribute__((vector_size(V)));
typedef uint32_t NAME(words) __attribute__((vector_size(V)));
#define LANES ((int64_t)(V / 4))
#define LOAD(variable, from) memcpy(&(variable), from, V)
#define STORE(to, variable) memcpy(to, &(variable), V)
#define LOW(word) ((NAME(floats))((word) << 16))
#define HIGH(word) ((NAME(floats))((word) & 0xFFFF0000u))
/* To the nearest bfloat16, ties to even. A NaN stays one: it has zeros where the carry comes from. */
#define ROUNDED(bits) ((bits) + 0x7FFFu + (((bits) >> 16) & 1u))
#define PACKED(low, high) ((ROUNDED((NAME(words))(low)) >> 16) | (ROUNDED((NAME(words))(high)) & 0xFFFF0000u))

static ALWAYS_INLINE int64_t NAME(bf16_half)(const char *x, char *out, const float *cos, const float *sin, int64_t j,
                                             int64_t pairs) {
    for (; j + 2 * LANES <= pairs; j += 2 * LANES) {
        NAME(words) a, b, left, right;
        NAME(floats) c, s, d, t;
        LOAD(a, x + 2 * j);
        LOAD(b, x + 2 * (j + pairs));
        LOAD(c, cos + j);
        LOAD(s, sin + j);
        LOAD(d, cos + j + LANES);
        LOAD(t, sin + j + LANES);
        left = PACKED(LOW(a) * c - LOW(b) * s, HIGH(a) * d - HIGH(b) * t);
        right = PACKED(LOW(b) * c + LOW(a) * s, HIGH(b) * d + HIGH(a) * t);
        STORE(out + 2 * j, left);
        STORE(out + 2 * (j + pairs), right);
    }
    return j;
}

static ALWAYS_INLINE int64_t NAME(bf16_adjacent)(const char *x, char *out, const float *cos, const float *sin,
                                                 int64_t j, int64_t pairs) {
    for (; j + LANES <= pairs; j += LANES) {
        NAME(words) both;
        NAME(floats) c, s;
        LOAD(both, x + 4 * j);
        LOAD(c, cos + j);
        LOAD(s, sin + j);
        both = PACKED(LOW(both) * c - HIGH(both) * s, HIGH(both) * c + LOW(both) * s);
        STORE(out + 4 * j, both);
    }
    return j;
}

static ALWAYS_INLINE int64_t NAME(fp32_half)(const char *x, char *out, const float *cos, const float *sin, int64_t j,
                                             int64_t pairs) {
    for (; j + LANES <= pairs; j += LANES) {
        NAME(floats) a, b, c, s, left, right;
        LOAD(a, x + 4 * j);
        LOAD(b, x + 4 * (j + pairs));
        LOAD(c, cos + j);
        LOAD(s, sin + j);
        left = a * c - b * s;
        right = b * c + a * s;
        STORE(out + 4 * j, left);
        STORE(out + 4 * (j + pairs), right);
    }
    return j;
}

#if V == 16
/* The first four of two vectors' elements by number, 4 to 7 being those of the second. */
#ifdef __clang__
#define PICK(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define PICK(a, b, i, j, k, l) __builtin_shuffle(a, b, (words_16){i, j, k, l})
#endif

static ALWAYS_INLINE int64_t fp32_adjacent(const char *x, char *out, const float *cos, const float *sin, int64_t j,
                                           int64_t pairs) {
    for (; j + 4 <= pairs; j += 4) {
        floats_16 low, high, c, s;
        LOAD(low, x + 8 * j);
        LOAD(high, x + 8 * j + 16);
        LOAD(c, cos + j);
        LOAD(s, sin + j);
        floats_16 a = PICK(low, high, 0, 2, 4, 6), b = PICK(low, high, 1, 3, 5, 7);
        floats_16 left = a * c - b * s, right = b * c + a * s;
        low = PICK(left, right, 0, 4, 1, 5);
        high = PICK(left, right, 2, 6, 3, 7);
        STORE(out + 8 * j, low);
        STORE(out + 8 * j + 16, high);
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
#undef ROUNDED
#undef PACKED
#undef NAME
#undef V
