/* The ids of all tokens of a placed table. The table is read as numbers that may be wrong: whatever they are,
 * nothing is written outside of out. */

#include <math.h>

#include "native.h"

typedef struct {
    int64_t tokens, skip, height, width;
} Segment;

enum { ORIGIN, STEP_FRAME, STEP_ROW, STEP_COL }; /* rows of an axis, see mmpos/columns.py */

/* How many rows of this width there are in so many tokens, but for those beyond the most. Divisions are dear. */
static inline int64_t whole_rows(int64_t tokens, int64_t width, int64_t most) {
    if (tokens == width) {
        return 1;
    }
    if (width <= INT32_MAX && most <= INT32_MAX && width * most <= tokens) {
        return most;
    }
    return tokens / width < most ? tokens / width : most;
}

#define T uint32_t
#define NAME(x) x##_int32
#define OUT(x) (x)
#include "rows.h"

#define T uint64_t
#define NAME(x) x##_int64
#define OUT(x) (x)
#include "rows.h"

#define T double
#define NAME(x) x##_whole
#define OUT(x) (x)
#include "rows.h"

#define T double
#define NAME(x) x##_fraction
#define OUT(x) ((x) / denominator)
#include "rows.h"

enum { OFFSET, SKIP, HEIGHT, WIDTH, DENOMINATOR, AXES }; /* rows of the table */

static inline int64_t at(const Matrix *table, int64_t row, int64_t column) {
    int64_t value;
    memcpy(&value, table->data + row * table->row_stride + column * 8, 8);
    return value;
}

/* Whether all numerators of a segment on an axis are doubles, every sum on the way to them included. */
static int exact(const Segment *s, const int64_t *steps) {
    double height = (double)s->height, width = (double)s->width;
    double frames = ((double)s->skip + (double)s->tokens) / (height * width) + 1;
    double reach = fabs((double)steps[ORIGIN]) + fabs((double)steps[STEP_FRAME]) * frames +
                   fabs((double)steps[STEP_ROW]) * height + fabs((double)steps[STEP_COL]) * width;
    return reach < 9007199254740992.0; /* 2**53 */
}

/* The same ids in fewer and longer rows, where they are. */
static Segment stretched(Segment s, int64_t *steps) {
    if (s.width == 1) { /* a column is a row */
        s.width = s.height;
        s.height = 1;
        steps[STEP_COL] = steps[STEP_ROW];
    }
    if (s.height == 1) { /* frames of one row are rows of one frame */
        s.height = INT64_MAX;
        steps[STEP_ROW] = steps[STEP_FRAME];
    }
    return s;
}

/* Fill out row by row; 0 if the table is not what a table is, or has numerators that are no doubles. */
static int expand(const Matrix *table, int64_t num_tokens, const Matrix *out, const uint8_t *axes) {
    int64_t begin = 0;
    for (int64_t column = 0; column < table->columns; column++) {
        int64_t stop = column + 1 < table->columns ? at(table, OFFSET, column + 1) : num_tokens;
        int64_t denominator = at(table, DENOMINATOR, column);
        if (stop < begin || stop > num_tokens) {
            return 0;
        }
        Segment found = {stop - begin, at(table, SKIP, column), at(table, HEIGHT, column), at(table, WIDTH, column)};
        if (found.skip < 0 || found.skip > INT64_MAX - found.tokens || found.height < 1 || found.width < 1 ||
            denominator < 1) {
            return 0;
        }
        for (int64_t row = 0; row < out->rows; row++) {
            int64_t steps[4];
            for (int64_t i = 0; i < 4; i++) {
                steps[i] = at(table, AXES + 4 * axes[row] + i, column);
            }
            if (out->format == 'd' && !exact(&found, steps)) {
                return 0;
            }
            Segment segment = stretched(found, steps);
            char *target = out->data + row * out->row_stride + begin * out->itemsize;
            if (out->format == 'd') {
                (denominator == 1 ? segment_whole : segment_fraction)(target, &segment, steps, denominator);
            } else {
                (out->itemsize == 4 ? segment_int32 : segment_int64)(target, &segment, steps, denominator);
            }
        }
        begin = stop;
    }
    return begin == num_tokens;
}

/* expand(table, num_tokens, fractional, out, axes) -> bool, whether out was filled.
 *
 * table: (5 + 4·axes, segments) int64; out: (rows, num_tokens) of numerators as int32 or int64 (not of fractional
 * tables), or of ids as float64, with any row stride; axes: bytes, the axis of each row, or None for all in order. */
PyObject *native_expand(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    static const uint8_t all[] = {0, 1, 2, 3, 4, 5, 6, 7};
    const uint8_t *axes = all;
    Py_buffer table_buffer, out_buffer;
    Matrix table, out;
    int done = 0;
    (void)self;
    if (count != 5 || !PyLong_Check(args[1])) {
        return PyErr_Format(PyExc_TypeError, "expand takes a table, tokens, whether fractional, out and axes");
    }
    int64_t num_tokens = PyLong_AsLongLong(args[1]);
    int fractional = args[2] == Py_True;
    if (!get_matrix(args[0], &table_buffer, &table, 0)) {
        Py_RETURN_FALSE;
    }
    if (!get_matrix(args[3], &out_buffer, &out, PyBUF_WRITABLE)) {
        PyBuffer_Release(&table_buffer);
        Py_RETURN_FALSE;
    }
    int64_t known = (table.rows - AXES) / 4;
    int fits = table.format == 'q' && known >= 1 && known <= (int64_t)sizeof all && out.columns == num_tokens &&
               (out.format == 'd' || ((out.format == 'i' || out.format == 'q') && !fractional));
    if (args[4] == Py_None) {
        fits = fits && out.rows == known;
    } else {
        char *given;
        Py_ssize_t rows;
        fits = PyBytes_AsStringAndSize(args[4], &given, &rows) == 0 && fits && rows == out.rows;
        axes = (const uint8_t *)given;
        for (int64_t row = 0; fits && row < out.rows; row++) {
            fits = axes[row] < known;
        }
    }
    if (fits && !PyErr_Occurred()) {
        if (out.rows * out.columns * out.itemsize < RELEASE_GIL_BYTES) {
            done = expand(&table, num_tokens, &out, axes);
        } else {
            Py_BEGIN_ALLOW_THREADS
            done = expand(&table, num_tokens, &out, axes);
            Py_END_ALLOW_THREADS
        }
    }
    PyBuffer_Release(&out_buffer);
    PyBuffer_Release(&table_buffer);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(done);
}
