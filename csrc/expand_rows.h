/* Write rows of ids of one element type. expand_vectors.h includes this file once per type, with its own macros and
 *
 *   T        element type: double, or an unsigned integer type, whose sums wrap around to the right result
 *   NAME(x)  name of x for this type
 *   OUT(x)   output for a numerator x: x itself, or its quotient or product with `unit`
 *
 * Output may be unaligned: it is written with memcpy, which compilers turn into unaligned vector stores. */

#define SIZE ((int64_t)sizeof(T))

/* Write `width` consecutive ids: value, value + step, … */
static TARGET inline void NAME(run)(char *out, int64_t width, T value, T step, T unit) {
    (void)unit;
    for (int64_t i = 0; i < width; i++) {
        T id = OUT(value + (T)i * step);
        memcpy(out + i * SIZE, &id, SIZE);
    }
}

#ifdef __GNUC__
typedef T NAME(vector) __attribute__((vector_size(V)));
#define LANES ((int64_t)(V / sizeof(T)))
#define STORE(out, numerators)              \
    do {                                    \
        NAME(vector) ids = OUT(numerators); \
        memcpy(out, &ids, V);               \
    } while (0)

static TARGET ALWAYS_INLINE NAME(vector) NAME(all)(T value) {
    NAME(vector) all;
    for (int64_t i = 0; i < LANES; i++) {
        all[i] = value;
    }
    return all;
}

static TARGET ALWAYS_INLINE NAME(vector) NAME(ramp)(T step) {
    NAME(vector) ramp;
    for (int64_t i = 0; i < LANES; i++) {
        ramp[i] = (T)i * step;
    }
    return ramp;
}

/* Write rows of `before` whole vectors (a constant) and a last vector that overlaps the one before it. */
static TARGET ALWAYS_INLINE void NAME(short_rows)(char *out, int64_t rows, int64_t width, const int64_t before, T value,
                                                  T step_row, T step_col, T unit) {
    NAME(vector) column[SHORT + 1], start = NAME(all)(value), down = NAME(all)(step_row);
    NAME(vector) ramp = NAME(ramp)(step_col), right = NAME(all)((T)LANES * step_col);
    (void)unit;
    column[before] = ramp + NAME(all)((T)(width - LANES) * step_col);
    for (int64_t i = 0; i < before; i++) {
        column[i] = ramp;
        ramp += right;
    }
    for (int64_t row = 0; row < rows; row++, out += width * SIZE) {
        for (int64_t i = 0; i < before; i++) {
            STORE(out + V * i, start + column[i]);
        }
        STORE(out + (width - LANES) * SIZE, start + column[before]);
        start += down;
    }
}

/* Write rows shorter than a vector. Each is written as a whole vector, whose excess the next row overwrites; the last
 * rows are written element by element. */
static TARGET inline void NAME(narrow_rows)(char *out, int64_t rows, int64_t width, T value, T step_row, T step_col,
                                            T unit) {
    NAME(vector) next = NAME(ramp)(step_col) + NAME(all)(value), down = NAME(all)(step_row);
    for (; rows * width >= LANES; rows--, value += step_row, out += width * SIZE) {
        STORE(out, next);
        next += down;
    }
    for (; rows > 0; rows--, value += step_row, out += width * SIZE) {
        NAME(run)(out, width, value, step_col, unit);
    }
}

/* Write a row of many vectors, four independent vectors at a time, and a last vector that ends with the row. */
static TARGET inline void NAME(long_row)(char *out, int64_t width, T value, T step, T unit) {
    const NAME(vector) ramp = NAME(ramp)(step), right = NAME(all)((T)LANES * step), far = right * 4;
    NAME(vector) first = ramp + NAME(all)(value);
    NAME(vector) second = first + right, third = second + right, fourth = third + right;
    int64_t i = 0;
    (void)unit;
    for (; i + 4 * LANES <= width; i += 4 * LANES) {
        STORE(out + i * SIZE, first);
        STORE(out + (i + LANES) * SIZE, second);
        STORE(out + (i + 2 * LANES) * SIZE, third);
        STORE(out + (i + 3 * LANES) * SIZE, fourth);
        first += far, second += far, third += far, fourth += far;
    }
    for (; i + LANES <= width; i += LANES) {
        STORE(out + i * SIZE, first);
        first += right;
    }
    STORE(out + (width - LANES) * SIZE, ramp + NAME(all)(value + (T)(width - LANES) * step));
}
#endif

/* Write rows × width ids. */
static TARGET void NAME(rows)(char *out, int64_t rows, int64_t width, T value, T step_row, T step_col, T unit) {
#ifdef __GNUC__
    if (width < LANES) {
        NAME(narrow_rows)(out, rows, width, value, step_row, step_col, unit);
        return;
    }
#define CASE(n)                                                                 \
    case n:                                                                     \
        NAME(short_rows)(out, rows, width, n, value, step_row, step_col, unit); \
        return;
    switch ((width - 1) / LANES) { /* common image widths */
        CASE(0) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
    }
#undef CASE
#endif
    for (int64_t row = 0; row < rows; row++, value += step_row, out += width * SIZE) {
#ifdef __GNUC__
        NAME(long_row)(out, width, value, step_col, unit);
#else
        NAME(run)(out, width, value, step_col, unit);
#endif
    }
}

/* Write the ids of a segment on one axis. */
static TARGET void NAME(segment)(char *out, const Segment *s, const int64_t *steps, T unit) {
    const T origin = (T)steps[ORIGIN];
    const T step_frame = (T)steps[STEP_FRAME], step_row = (T)steps[STEP_ROW], step_col = (T)steps[STEP_COL];
    int64_t left = s->tokens, col = 0, row = 0, frame = 0;
    if (s->skip > 0) {
        col = s->skip % s->width;
        row = s->skip / s->width % s->height;
        frame = s->skip / s->width / s->height;
    }
    while (left > 0) {
        T value = origin + (T)frame * step_frame + (T)row * step_row;
        if (col > 0 || left < s->width) { /* part of a row */
            int64_t width = s->width - col < left ? s->width - col : left;
            NAME(rows)(out, 1, width, value + (T)col * step_col, step_row, step_col, unit);
            left -= width;
            out += width * SIZE;
            col = 0;
            row++;
        } else { /* whole rows, up to the end of the frame */
            int64_t rows = whole_rows(left, s->width, s->height - row);
            NAME(rows)(out, rows, s->width, value, step_row, step_col, unit);
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
#undef STORE
#endif
#undef SIZE
#undef OUT
#undef NAME
#undef T
