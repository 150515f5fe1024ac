/* Scan token ids of one element type. placeholders.c includes this file once per type, with
 *
 *   T        integer type of an element
 *   NAME(x)  name of x for this type
 *
 * Ids are compared in blocks, which compilers vectorise, before they are compared one by one. */

static inline T NAME(at)(const char *ids, int64_t i) {
    T id;
    memcpy(&id, ids + i * (int64_t)sizeof(T), sizeof(T));
    return id;
}

/* Return the index of the first id from i on that is one of `count` (at most three) tokens, else stop. */
static ALWAYS_INLINE int64_t NAME(first)(const char *ids, int64_t i, int64_t stop, const int64_t *tokens, int count) {
    T a = (T)tokens[0], b = (T)tokens[1], c = (T)tokens[2];
    for (;;) {
        for (; stop - i >= BLOCK; i += BLOCK) {
            uint32_t hit = 0;
            for (int64_t k = 0; k < BLOCK; k++) {
                uint32_t low = (uint32_t)NAME(at)(ids, i + k);
                hit |= (uint32_t)(low == (uint32_t)a);
                if (count > 1) {
                    hit |= (uint32_t)(low == (uint32_t)b);
                }
                if (count > 2) {
                    hit |= (uint32_t)(low == (uint32_t)c);
                }
            }
            if (hit) {
                break;
            }
        }
        int64_t end = stop - i >= BLOCK ? i + BLOCK : stop;
        for (; i < end; i++) {
            T id = NAME(at)(ids, i);
            if (id == a || (count > 1 && id == b) || (count > 2 && id == c)) {
                return i;
            }
        }
        if (i == stop) {
            return stop;
        }
    }
}

static int64_t NAME(next)(const char *ids, int64_t i, int64_t stop, const int64_t *tokens, int count) {
    return count == 0   ? stop
           : count == 1 ? NAME(first)(ids, i, stop, tokens, 1)
           : count == 2 ? NAME(first)(ids, i, stop, tokens, 2)
                        : NAME(first)(ids, i, stop, tokens, 3);
}

/* Return the index of the first id from i on that differs from `token`, else stop. */
static int64_t NAME(other)(const char *ids, int64_t i, int64_t stop, T token) {
    for (; stop - i >= BLOCK; i += BLOCK) {
        T differs = 0;
        for (int64_t k = 0; k < BLOCK; k++) {
            differs |= NAME(at)(ids, i + k) ^ token;
        }
        if (differs) {
            break;
        }
    }
    while (i < stop && NAME(at)(ids, i) == token) {
        i++;
    }
    return i;
}

/* Return whether all ids are 0, 1 or 2. */
static int NAME(types)(const char *ids, int64_t i, int64_t stop) {
    T any = 0, three = 0;
    for (; i < stop; i++) {
        T id = NAME(at)(ids, i);
        any |= id;
        three |= (T)(id & (id >> 1));
    }
    return (any & ~(T)3) == 0 && (three & 1) == 0;
}

#undef NAME
#undef T
