/* Write the ids of all tokens of a placed table. The numbers in the table are not trusted: whatever their values,
 * nothing is written outside `out`. */

#include <math.h>

#include "table.h"

typedef struct {
    int64_t tokens, skip, height, width;
} Segment;

/* Return min(tokens / width, most), avoiding slow divisions in common cases. */
static inline int64_t whole_rows(int64_t tokens, int64_t width, int64_t most) {
    if (tokens == width) {
        return 1;
    }
    if (width <= INT32_MAX && most <= INT32_MAX && width * most <= tokens) {
        return most;
    }
    return tokens / width < most ? tokens / width : most;
}

#define SHORT 8 /* the most whole vectors per row that the unrolled loops write */

/* Return whether all numerators of a segment on an axis, and all intermediate sums, are exact as doubles. */
static inline int exact(const Segment *s, const int64_t *steps) {
    double height = (double)s->height, width = (double)s->width;
    double frames = ((double)s->skip + (double)s->tokens) / (height * width) + 1;
    double reach = fabs((double)steps[ORIGIN]) + fabs((double)steps[STEP_FRAME]) * frames +
                   fabs((double)steps[STEP_ROW]) * height + fabs((double)steps[STEP_COL]) * width;
    return reach < 9007199254740992.0; /* 2**53 */
}

/* Return a segment with the same ids in fewer, longer rows if possible. */
static inline Segment stretched(Segment s, int64_t *steps) {
    if (s.width == 1) { /* a column becomes a row */
        s.width = s.height;
        s.height = 1;
        steps[STEP_COL] = steps[STEP_ROW];
    }
    if (s.width == 1) { /* frames of one token become one endless row */
        s.width = INT64_MAX;
        steps[STEP_COL] = steps[STEP_FRAME];
    } else if (s.height == 1) { /* frames of one row become the rows of one frame */
        s.height = INT64_MAX;
        steps[STEP_ROW] = steps[STEP_FRAME];
    }
    return s;
}

#define V 16
#define TARGET
#define W(x) x##_16
#include "expand_vectors.h"

#define V 32
#define TARGET WIDE
#define W(x) x##_32
#include "expand_vectors.h"

int expand_ids(const Matrix *table, int64_t num_tokens, const Matrix *out, const uint8_t *axes, int wide) {
    return (wide && has_wide() ? expand_32 : expand_16)(table, num_tokens, out, axes);
}

/* expand(table, num_tokens, fractional, out, axes, wide) -> bool: True if out was filled.
 *
 * table: (5 + 4·axes, segments) int64; out: (rows, num_tokens) ids as float64, or, unless the table is fractional, as
 * int32 or int64, with any row stride; axes: bytes with the axis of each row, or None for all in order; wide: whether
 * to use the widest vectors of this CPU instead of the baseline. */
PyObject *native_expand(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    static const uint8_t all[MAX_IDS] = {0, 1, 2, 3, 4, 5, 6, 7};
    const uint8_t *axes = all;
    Buffers buffers;
    Matrix table, out;
    int done = 0;
    buffers.count = 0;
    (void)self;
    if (!arguments("expand", 6, count)) {
        return NULL;
    }
    int64_t num_tokens = PyLong_AsLongLong(args[1]);
    if (num_tokens == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (take_matrix(&buffers, args[0], 0, &table) && take_matrix(&buffers, args[3], PyBUF_WRITABLE, &out)) {
        int64_t known = (table.rows - AXES) / 4;
        int fits = table.format == 'q' && known >= 1 && known <= MAX_IDS && out.columns == num_tokens &&
                   (num_tokens < 2 || out.column_stride == out.itemsize) &&
                   (out.format == 'd' || ((out.format == 'i' || out.format == 'q') && args[2] == Py_False));
        if (args[4] == Py_None) {
            fits = fits && out.rows == known;
        } else {
            axes = (const uint8_t *)PyBytes_AsString(args[4]);
            fits = fits && axes != NULL && PyBytes_Size(args[4]) == out.rows;
            for (int64_t row = 0; fits && row < out.rows; row++) {
                fits = axes[row] < known;
            }
        }
        int wide = args[5] == Py_True;
        if (fits && out.rows * out.columns * out.itemsize < RELEASE_GIL_BYTES) {
            done = expand_ids(&table, num_tokens, &out, axes, wide);
        } else if (fits) {
            Py_BEGIN_ALLOW_THREADS
                done = expand_ids(&table, num_tokens, &out, axes, wide);
            Py_END_ALLOW_THREADS
        }
    }
    release(&buffers);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(done);
}

static int fill_mask(const Matrix *table, const Vector *mask) {
    int64_t token = 0;
    for (int64_t s = 0; s < table->columns; s++) {
        int64_t end = s + 1 < table->columns ? entry(table, OFFSET, s + 1) : mask->size, real = !is_padding(table, s);
        if (entry(table, OFFSET, s) != token || end < token || end > mask->size) {
            return 0;
        }
        for (; token < end; token++) {
            put_int64(mask->data + 8 * token, real);
        }
    }
    return token == mask->size;
}

/* mask(table, out) -> bool: True if out, (tokens,) int64, was filled with 1 for tokens and 0 for padding. */
PyObject *native_mask(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Buffers buffers;
    Matrix table;
    Vector mask;
    (void)self;
    if (!arguments("mask", 2, count)) {
        return NULL;
    }
    buffers.count = 0;
    int done = take_matrix(&buffers, args[0], 0, &table) && table.format == 'q' && table.rows > AXES &&
               take_vector(&buffers, args[1], 'q', PyBUF_WRITABLE, &mask) && mask.stride == 8;
    if (done && 8 * mask.size < RELEASE_GIL_BYTES) {
        done = fill_mask(&table, &mask);
    } else if (done) {
        Py_BEGIN_ALLOW_THREADS
            done = fill_mask(&table, &mask);
        Py_END_ALLOW_THREADS
    }
    release(&buffers);
    return PyBool_FromLong(done);
}
