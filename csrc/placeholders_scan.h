/* Scans of token ids of one element type. Included once per type, with
 *
 *   T        the element, an integer
 *   NAME(x)  the name x has for this type
 *
 * Ids are looked at in blocks, which vectors do, before they are one by one. */

static inline T NAME(at)(const char *ids, int64_t i) {
    T id;
    memcpy(&id, ids + i * (int64_t)sizeof(T), sizeof(T));
    return id;
}

/* The first of one or two tokens from i on, else stop. */
static inline int64_t NAME(next)(const char *ids, int64_t i, int64_t stop, T token, T other, int two) {
    for (;;) {
        for (; stop - i >= BLOCK; i += BLOCK) {
            uint32_t hit = 0;
            for (int64_t k = 0; k < BLOCK; k++) {
                uint32_t low = (uint32_t)NAME(at)(ids, i + k);
                hit |= (uint32_t)(low == (uint32_t)token);
                if (two) {
                    hit |= (uint32_t)(low == (uint32_t)other);
                }
            }
            if (hit) {
                break;
            }
        }
        int64_t end = stop - i >= BLOCK ? i + BLOCK : stop;
        for (; i < end; i++) {
            T id = NAME(at)(ids, i);
            if (id == token || (two && id == other)) {
                return i;
            }
        }
        if (i == stop) {
            return stop;
        }
    }
}

/* The first id from i on that is not this token, else stop. */
static inline int64_t NAME(other)(const char *ids, int64_t i, int64_t stop, T token) {
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

/* Add the runs of the tokens of a document from i on; 0 for want of memory. */
static inline int NAME(document)(Runs *runs, const char *ids, int64_t document, int64_t i, int64_t stop, T token,
                                 T other, int two) {
    while ((i = two ? NAME(next)(ids, i, stop, token, other, 1) : NAME(next)(ids, i, stop, token, token, 0)) < stop) {
        T found = NAME(at)(ids, i);
        int64_t end = NAME(other)(ids, i, stop, found);
        if (!add_run(runs, document, i, end - i, found != token)) {
            return 0;
        }
        i = end;
    }
    return 1;
}

/* Whether elements up to stop are zeros, then at least one one, then zeros; where the ones begin and end. */
static inline int NAME(one_run)(const char *elements, int64_t stop, int64_t *begin, int64_t *end) {
    *begin = NAME(other)(elements, 0, stop, 0);
    *end = NAME(other)(elements, *begin, stop, 1);
    return *begin < *end && NAME(other)(elements, *end, stop, 0) == stop;
}

#undef NAME
#undef T
