/* Runs of placeholder tokens in token ids, and of ones in masks, in one pass over them. */

#include <stdlib.h>

#include "native.h"

#define BLOCK 64 /* ids that are looked at together, before one by one */

typedef struct {
    int64_t *data; /* document, first token, tokens and kind of every run */
    int64_t size, room;
} Runs;

static int add_run(Runs *runs, int64_t document, int64_t first, int64_t tokens, int64_t kind) {
    if (runs->size == runs->room) {
        int64_t room = 2 * runs->room + 64;
        int64_t *data = realloc(runs->data, (size_t)room * 4 * sizeof *data);
        if (data == NULL) {
            return 0;
        }
        runs->data = data;
        runs->room = room;
    }
    int64_t run[4] = {document, first, tokens, kind};
    memcpy(runs->data + 4 * runs->size++, run, sizeof run);
    return 1;
}

#define T int32_t
#define NAME(x) x##_narrow
#include "placeholders_scan.h"

#define T int64_t
#define NAME(x) x##_wide
#include "placeholders_scan.h"

#define T uint8_t
#define NAME(x) x##_byte
#include "placeholders_scan.h"

/* 1, or 0 for documents outside of the ids, or -1 for want of memory. */
static int scan(Runs *runs, const Vector *ids, int wide, const Vector *starts, const Vector *stops, int64_t token,
                int64_t other, int two) {
    for (int64_t d = 0; d < starts->size; d++) {
        int64_t start = item(starts, d), stop = item(stops, d);
        if (start < 0 || stop < start || stop > ids->size) {
            return 0;
        }
        int room = wide ? document_wide(runs, ids->data, d, start, stop, token, other, two)
                        : document_narrow(runs, ids->data, d, start, stop, (int32_t)token, (int32_t)other, two);
        if (!room) {
            return -1;
        }
    }
    return 1;
}

/* runs(input_ids, starts, stops, token, other) -> bytes of int64 quadruples, or None.
 *
 * input_ids: (tokens,) int32 or int64, contiguous; starts, stops: (documents,) int64; token, other: int32 ids, or -1
 * for no other. Of every run of one of the tokens in a document: the document, its first token among all, how many,
 * and 0 for token, 1 for other. */
PyObject *native_runs(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Buffers buffers;
    Vector ids, starts, stops;
    Runs runs = {NULL, 0, 0};
    int done = 0, wide = 1;
    (void)self;
    if (!arguments("runs", 5, count)) {
        return NULL;
    }
    int64_t token = PyLong_AsLongLong(args[3]), other = PyLong_AsLongLong(args[4]);
    if (PyErr_Occurred()) { /* beyond int64 */
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    buffers.count = 0;
    int fits = take_vector(&buffers, args[0], 'q', 0, &ids);
    if (!fits) {
        wide = 0;
        fits = take_vector(&buffers, args[0], 'i', 0, &ids);
    }
    fits = fits && take_vector(&buffers, args[1], 'q', 0, &starts) && take_vector(&buffers, args[2], 'q', 0, &stops) &&
           starts.size == stops.size && (ids.size < 2 || ids.stride == (wide ? 8 : 4)) && token >= 0 &&
           token <= INT32_MAX && other >= -1 && other <= INT32_MAX;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
            done = scan(&runs, &ids, wide, &starts, &stops, token, other, other >= 0);
        Py_END_ALLOW_THREADS
    }
    PyObject *result = done == 1 ? PyBytes_FromStringAndSize((char *)runs.data, 32 * runs.size) : NULL;
    free(runs.data);
    release(&buffers);
    if (done == -1) {
        return PyErr_NoMemory();
    }
    return done == 1 ? result : Py_NewRef(Py_None);
}

/* Where the ones of a row begin and end; 0 if it has none, a hole, or other numbers. */
static int ones(const Matrix *mask, int64_t row, int64_t *begin, int64_t *end) {
    const char *data = mask->data + row * mask->row_stride;
    int64_t stop = mask->columns;
    if (mask->itemsize == 8) {
        return one_run_wide(data, stop, begin, end);
    }
    return mask->itemsize == 4 ? one_run_narrow(data, stop, begin, end) : one_run_byte(data, stop, begin, end);
}

/* ones(mask, left, right) -> bool, whether every row of a mask is zeros, then at least one one, then zeros.
 *
 * mask: (batch, seq) bool, uint8, int32 or int64; fills left and right, (batch,) int64, with the zeros around. */
PyObject *native_ones(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Buffers buffers;
    Matrix mask;
    Vector left, right;
    int done = 0;
    (void)self;
    if (!arguments("ones", 3, count)) {
        return NULL;
    }
    buffers.count = 0;
    if (take_matrix(&buffers, args[0], 0, &mask) && take_vector(&buffers, args[1], 'q', PyBUF_WRITABLE, &left) &&
        take_vector(&buffers, args[2], 'q', PyBUF_WRITABLE, &right) && mask.format != 0 &&
        strchr("?Biq", mask.format) != NULL && (mask.columns < 2 || mask.column_stride == mask.itemsize) &&
        left.size == mask.rows && right.size == mask.rows) {
        Py_BEGIN_ALLOW_THREADS
            done = 1;
            for (int64_t row = 0; done && row < mask.rows; row++) {
                int64_t begin, end;
                done = ones(&mask, row, &begin, &end);
                put(&left, row, begin);
                put(&right, row, mask.columns - end);
            }
        Py_END_ALLOW_THREADS
    }
    release(&buffers);
    return PyBool_FromLong(done);
}
