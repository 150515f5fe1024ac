/* What the files of the extension share. Limited API of CPython 3.11; no numpy headers: arrays come as buffers.
 *
 * Every function answers or declines. It returns None, or a falsy value that its comment names, for arguments that
 * are not exactly what the fast way takes; the caller then takes the numpy way, whose words name the mistake. */

#ifndef MMPOS_NATIVE_H
#define MMPOS_NATIVE_H

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

/* Work below this many bytes is done before another thread could make use of the interpreter. */
#define RELEASE_GIL_BYTES (1 << 16)

/* A two-dimensional buffer whose rows are contiguous, at any distance from each other. */
typedef struct {
    char *data;
    int64_t rows, columns, row_stride, itemsize;
    char format; /* 'i' int32, 'q' int64, 'd' float64, or 0 for anything else */
} Matrix;

/* Take a buffer, which the caller releases; 0, with nothing to release and no exception set, if it is no Matrix. */
int get_matrix(PyObject *object, Py_buffer *buffer, Matrix *matrix, int flags);

PyObject *native_expand(PyObject *self, PyObject *const *args, Py_ssize_t count);

#endif
