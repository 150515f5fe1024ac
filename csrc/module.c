/* The extension module: its functions, and access to arrays. */

#include "native.h"

char format_of(const Py_buffer *buffer) {
    const char *format = buffer->format;
    if (format == NULL || format[0] == '\0' || format[1] != '\0') { /* accept one native element without a byte order */
        return 0;
    }
    switch (format[0]) {
        case 'i':
        case 'l': /* four bytes on some platforms, eight on others */
        case 'q':
            return buffer->itemsize == 8 ? 'q' : buffer->itemsize == 4 ? 'i' : 0;
        case 'B':
        case '?':
        case 'd':
        case 'f':
        case 'h':
            return format[0];
        default:
            return 0;
    }
}

/* Get a buffer with any number of dimensions. */
static Py_buffer *take_any(Buffers *buffers, PyObject *object, int flags) {
    if (buffers->count == (int)(sizeof buffers->taken / sizeof buffers->taken[0])) {
        return NULL;
    }
    Py_buffer *buffer = &buffers->taken[buffers->count];
    if (PyObject_GetBuffer(object, buffer, PyBUF_STRIDES | PyBUF_FORMAT | flags) != 0) {
        PyErr_Clear();
        return NULL;
    }
    buffers->count++; /* released with the others even if it is rejected */
    return buffer;
}

Py_buffer *take_buffer(Buffers *buffers, PyObject *object, int dimensions, int flags) {
    Py_buffer *buffer = take_any(buffers, object, flags);
    return buffer != NULL && buffer->ndim == dimensions ? buffer : NULL;
}

Py_buffer *take_flat(Buffers *buffers, PyObject *object, char format, int flags) {
    Py_buffer *buffer = take_any(buffers, object, PyBUF_C_CONTIGUOUS | flags);
    return buffer != NULL && format_of(buffer) == format ? buffer : NULL;
}

int take_vector(Buffers *buffers, PyObject *object, char format, int flags, Vector *vector) {
    Py_buffer *buffer = take_buffer(buffers, object, 1, flags);
    if (buffer == NULL || format_of(buffer) != format) {
        return 0;
    }
    vector->data = buffer->buf;
    vector->size = buffer->shape[0];
    vector->stride = buffer->strides[0];
    return 1;
}

int take_matrix(Buffers *buffers, PyObject *object, int flags, Matrix *matrix) {
    Py_buffer *buffer = take_buffer(buffers, object, 2, flags);
    if (buffer == NULL) {
        return 0;
    }
    matrix->data = buffer->buf;
    matrix->rows = buffer->shape[0];
    matrix->columns = buffer->shape[1];
    matrix->row_stride = buffer->strides[0];
    matrix->column_stride = buffer->strides[1];
    matrix->itemsize = buffer->itemsize;
    matrix->format = format_of(buffer);
    return 1;
}

void release(Buffers *buffers) {
    while (buffers->count > 0) {
        PyBuffer_Release(&buffers->taken[--buffers->count]);
    }
}

PyObject *answer(Buffers *buffers, PyObject *result) {
    release(buffers);
    return result != NULL || PyErr_Occurred() ? result : Py_NewRef(Py_None);
}

Py_ssize_t length_of(PyObject *list) {
    return PyList_CheckExact(list) ? PyList_Size(list) : PyTuple_CheckExact(list) ? PyTuple_Size(list) : -1;
}

int arguments(const char *name, Py_ssize_t wanted, Py_ssize_t got) {
    if (got != wanted) {
        PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, wanted, got);
    }
    return got == wanted;
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))native_##name, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    METHOD(collate), METHOD(concatenate), METHOD(cut),    METHOD(documents),     METHOD(enter),
    METHOD(expand),  METHOD(integers),    METHOD(joined), METHOD(mask),          METHOD(numbers),
    METHOD(place),   METHOD(placed),      METHOD(rotate), METHOD(scan),          METHOD(segments),
    METHOD(served),  METHOD(sound),       METHOD(spans),  {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED}, /* calls share no state and hold references to the list items they read */
#endif
    {0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    "mmpos._native",
    "Fast ways of what mmpos says in Python.",
    0,
    methods,
    slots,
    NULL,
    NULL,
    NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module); }
