/* Rows of ids of one element type. Included once per type, with
 *
 *   T        the element: an unsigned integer, whose sums wrap around and come out right, or double
 *   NAME(x)  the name x has for this type
 *   OUT(x)   what is written of a numerator x: itself, or a quotient by `denominator`
 *
 * Output may lie at any address: it is written through memcpy, of which compilers make unaligned vector stores. */

#define SIZE ((int64_t)sizeof(T))

/* width consecutive ids: value, value + step, … */
static inline void NAME(run)(char *out, int64_t width, T value, T step, T denominator) {
    (void)denominator;
    for (int64_t i = 0; i < width; i++) {
        T id = OUT(value + (T)i * step);
        memcpy(out + i * SIZE, &id, SIZE);
    }
}

#ifdef __GNUC__
typedef T NAME(vector) __attribute__((vector_size(16)));
#define UNROLLED 8 /* whole vectors of a row up to which rows are unrolled */
#define LANES ((int64_t)(16 / sizeof(T)))
#define STORE(out, numerators)            \
    do {                                  \
        NAME(vector) ids = OUT(numerators); \
        memcpy(out, &ids, 16);            \
    } while (0)

/* Rows of `before` whole vectors and one that ends the row, over the end of the one before it. */
static inline __attribute__((always_inline)) void NAME(vectors)(char *out, int64_t rows, int64_t width, int64_t before,
                                                                T value, T step_row, T step_col, T denominator) {
    NAME(vector) first, right = {0}, down = {0};
    (void)denominator;
    for (int64_t i = 0; i < LANES; i++) {
        first[i] = value + (T)i * step_col;
    }
    right += (T)LANES * step_col;
    down += step_row;
    NAME(vector) last = first + (T)(width - LANES) * step_col;
    for (int64_t row = 0; row < rows; row++, out += width * SIZE) {
        NAME(vector) next = first;
        int64_t i = 0;
        if (before > UNROLLED) { /* four at a time, none of which waits for another */
            NAME(vector) second = next + right, third = second + right, fourth = third + right, far = right * 4;
            for (; i + 4 <= before; i += 4) {
                STORE(out + 16 * i, next);
                STORE(out + 16 * i + 16, second);
                STORE(out + 16 * i + 32, third);
                STORE(out + 16 * i + 48, fourth);
                next += far, second += far, third += far, fourth += far;
            }
        }
        for (; i < before; i++) {
            STORE(out + 16 * i, next);
            next += right;
        }
        STORE(out + (width - LANES) * SIZE, last);
        first += down;
        last += down;
    }
}
#endif

/* rows × width ids, row after row. */
static void NAME(rows)(char *out, int64_t rows, int64_t width, T value, T step_row, T step_col, T denominator) {
#ifdef __GNUC__
    if (width >= LANES) {
        int64_t before = (width - 1) / LANES;
#define CASE(n)                                                                            \
    case n:                                                                                \
        NAME(vectors)(out, rows, width, n, value, step_row, step_col, denominator);        \
        return;
        switch (before) { /* the usual widths of images, unrolled */
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
        }
#undef CASE
        NAME(vectors)(out, rows, width, before, value, step_row, step_col, denominator);
        return;
    }
#endif
    for (int64_t row = 0; row < rows; row++) {
        NAME(run)(out + row * width * SIZE, width, value + (T)row * step_row, step_col, denominator);
    }
}

/* Ids of one axis of one segment. */
static void NAME(segment)(char *out, const Segment *s, const int64_t *steps, int64_t denominator_) {
    const T denominator = (T)denominator_, origin = (T)steps[ORIGIN];
    const T step_frame = (T)steps[STEP_FRAME], step_row = (T)steps[STEP_ROW], step_col = (T)steps[STEP_COL];
    int64_t left = s->tokens, col = 0, row = 0, frame = 0;
    if (s->skip > 0) {
        col = s->skip % s->width;
        row = s->skip / s->width % s->height;
        frame = s->skip / s->width / s->height;
    }
    while (left > 0) {
        T value = origin + (T)frame * step_frame + (T)row * step_row;
        if (col > 0 || left < s->width) { /* a part of a row */
            int64_t width = s->width - col < left ? s->width - col : left;
            NAME(rows)(out, 1, width, value + (T)col * step_col, step_row, step_col, denominator);
            left -= width;
            out += width * SIZE;
            col = 0;
            row++;
        } else { /* whole rows, up to the end of the frame */
            int64_t rows = whole_rows(left, s->width, s->height - row);
            NAME(rows)(out, rows, s->width, value, step_row, step_col, denominator);
            left -= rows * s->width;
            out += rows * s->width * SIZE;
            row += rows;
        }
        if (row == s->height) {
            row = 0;
            frame++;
        }
    }
}

#ifdef __GNUC__
#undef LANES
#undef UNROLLED
#undef STORE
#endif
#undef SIZE
#undef OUT
#undef NAME
#undef T
