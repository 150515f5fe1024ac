/* The extension module: names, and how arrays come in. */

#include "native.h"

static char format_of(const Py_buffer *buffer) {
    const char *format = buffer->format;
    if (format == NULL || format[0] == '\0' || format[1] != '\0') { /* one native element, no byte order told */
        return 0;
    }
    switch (format[0]) {
        case 'i':
            return buffer->itemsize == 4 ? 'i' : 0;
        case 'l': /* four bytes on some platforms */
        case 'q':
            return buffer->itemsize == 8 ? 'q' : buffer->itemsize == 4 ? 'i' : 0;
        case 'd':
            return 'd';
        default:
            return 0;
    }
}

int get_matrix(PyObject *object, Py_buffer *buffer, Matrix *matrix, int flags) {
    if (PyObject_GetBuffer(object, buffer, PyBUF_STRIDES | PyBUF_FORMAT | flags) != 0) {
        PyErr_Clear();
        return 0;
    }
    if (buffer->ndim != 2 || (buffer->shape[1] > 1 && buffer->strides[1] != buffer->itemsize)) {
        PyBuffer_Release(buffer);
        return 0;
    }
    matrix->data = buffer->buf;
    matrix->rows = buffer->shape[0];
    matrix->columns = buffer->shape[1];
    matrix->row_stride = buffer->strides[0];
    matrix->itemsize = buffer->itemsize;
    matrix->format = format_of(buffer);
    return 1;
}

static PyMethodDef methods[] = {
    {"expand", (PyCFunction)(void (*)(void))native_expand, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "mmpos._native", "Fast ways of what mmpos says in Python.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) {
    return PyModuleDef_Init(&module);
}
