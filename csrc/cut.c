/* Token ranges of a placed table. */

#include "native.h"

enum { OFFSET, SKIP }; /* mmpos/columns.py */

/* The last segment that begins at or before a token, from a guess on, since ranges mostly ascend. */
static int64_t segment_of(const Matrix *table, int64_t token, int64_t guess) {
    int64_t low = 0, high = table->columns; /* the answer is in [low, high) */
    if (guess < high && entry(table, OFFSET, guess) <= token) {
        low = guess;
        if (guess + 1 == high || entry(table, OFFSET, guess + 1) > token) {
            return guess;
        }
    }
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (entry(table, OFFSET, middle) <= token) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/* Pieces of segments inside ranges: written with places for them, counted without; -1 for a mistake. */
static int64_t cut(const Matrix *table, int64_t tokens, const Vector *starts, const Vector *stops, int64_t room,
                   char *columns, char *segments, char *owners) {
    int64_t pieces = 0, s = 0;
    for (int64_t range = 0; range < starts->size; range++) {
        int64_t start = item(starts, range), stop = item(stops, range);
        if (start < 0 || stop > tokens || stop < start) {
            return -1;
        }
        if (start < stop) {
            s = segment_of(table, start, s);
        }
        for (int64_t token = start; token < stop; pieces++) {
            int64_t end = s + 1 < table->columns ? entry(table, OFFSET, s + 1) : tokens;
            if (end <= token) {
                return -1;
            }
            end = end < stop ? end : stop;
            if (columns != NULL) {
                if (pieces >= room) {
                    return -1;
                }
                for (int64_t row = 0; row < table->rows; row++) {
                    put_int64(columns + 8 * (row * room + pieces), entry(table, row, s));
                }
                int64_t skip = plus(entry(table, SKIP, s), minus(token, entry(table, OFFSET, s)));
                put_int64(columns + 8 * (SKIP * room + pieces), skip);
                put_int64(columns + 8 * (OFFSET * room + pieces), end - token);
                put_int64(segments + 8 * pieces, s);
                put_int64(owners + 8 * pieces, range);
            }
            token = end;
            if (token < stop) {
                s++;
            }
        }
    }
    return pieces;
}

/* cut(table, tokens, starts, stops) -> (pieces, columns, segments, owners), the last three as bytes of int64, or None.
 *
 * table: (rows, segments) int64; starts, stops: (ranges,) int64. See mmpos/ranges.py for what comes back. */
PyObject *native_cut(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Buffers buffers;
    Matrix table;
    Vector starts, stops;
    PyObject *result = NULL;
    (void)self;
    if (count != 4) {
        return PyErr_Format(PyExc_TypeError, "cut takes 4 arguments, got %zd", count);
    }
    int64_t tokens = PyLong_AsLongLong(args[1]);
    if (tokens == -1 && PyErr_Occurred()) {
        return NULL;
    }
    buffers.count = 0;
    if (take_matrix(&buffers, args[0], 0, &table) && take_vector(&buffers, args[2], 'q', 0, &starts) &&
        take_vector(&buffers, args[3], 'q', 0, &stops) && table.format == 'q' && table.rows > SKIP &&
        (table.columns > 0 || tokens == 0) && starts.size == stops.size) {
        int64_t pieces = cut(&table, tokens, &starts, &stops, 0, NULL, NULL, NULL);
        if (pieces >= 0) {
            PyObject *columns = PyBytes_FromStringAndSize(NULL, 8 * table.rows * pieces);
            PyObject *segments = PyBytes_FromStringAndSize(NULL, 8 * pieces);
            PyObject *owners = PyBytes_FromStringAndSize(NULL, 8 * pieces);
            if (columns != NULL && segments != NULL && owners != NULL &&
                cut(&table, tokens, &starts, &stops, pieces, PyBytes_AsString(columns), PyBytes_AsString(segments),
                    PyBytes_AsString(owners)) == pieces) {
                result = Py_BuildValue("nOOO", (Py_ssize_t)pieces, columns, segments, owners);
            }
            Py_XDECREF(columns);
            Py_XDECREF(segments);
            Py_XDECREF(owners);
        }
    }
    release(&buffers);
    return result != NULL || PyErr_Occurred() ? result : Py_NewRef(Py_None);
}
