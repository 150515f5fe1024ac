/* Read lists of numbers from messages in protobuf's wire format. */

#include "wire.h"

#define MAX_LISTS 16

/* Find the bytes of packed fields in a message; return 0 for bytes that no encoder writes. */
static int find_fields(const uint8_t *at, const uint8_t *end, const uint8_t *numbers, int64_t count, Span *found) {
    while (at < end) {
        uint64_t tag, value;
        at = varint(at, end, 5, &tag);
        if (at == NULL || tag >> 3 == 0) {
            return 0;
        }
        int kind = (int)(tag & 7);
        if (kind == VARINT) {
            at = varint(at, end, 10, &value);
        } else if (kind == FIXED64 || kind == FIXED32) {
            int64_t length = kind == FIXED64 ? 8 : 4;
            at = end - at >= length ? at + length : NULL;
        } else if (kind == BYTES) {
            at = varint(at, end, 10, &value);
            if (at == NULL || value > (uint64_t)(end - at)) {
                return 0;
            }
            for (int64_t i = 0; i < count; i++) {
                if (numbers[i] == tag >> 3) {
                    if (found[i].begin != NULL) {
                        return 0;
                    }
                    found[i] = (Span){at, at + value};
                }
            }
            at += value;
        } else {
            return 0; /* a group of an unknown field */
        }
        if (at == NULL) {
            return 0;
        }
    }
    return 1;
}

/* Return the numbers of a packed field as a bytes object; NULL without an exception if they are malformed. */
static PyObject *numbers_of(const Span *span, int release_gil) {
    int64_t count = varints(span->begin, span->end);
    PyObject *result = count < 0 ? NULL : PyBytes_FromStringAndSize(NULL, 8 * count);
    if (result != NULL) {
        char *out = PyBytes_AsString(result);
        if (release_gil) {
            Py_BEGIN_ALLOW_THREADS
                unpack(span, out);
            Py_END_ALLOW_THREADS
        } else {
            unpack(span, out);
        }
    }
    return result;
}

/* integers(raw, fields) -> tuple of bytes, the int64 numbers of each of these fields of a message; or None.
 *
 * raw: a message as an encoder writes it; fields: bytes with the numbers of up to 16 repeated varint fields. */
PyObject *native_integers(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Buffers buffers;
    Span found[MAX_LISTS] = {{NULL, NULL}};
    PyObject *result = NULL;
    (void)self;
    if (!arguments("integers", 2, count)) {
        return NULL;
    }
    buffers.count = 0;
    Py_buffer *raw = take_flat(&buffers, args[0], 'B', 0), *fields = take_flat(&buffers, args[1], 'B', 0);
    if (raw != NULL && fields != NULL && fields->len <= MAX_LISTS) {
        const uint8_t *begin = raw->buf;
        if (find_fields(begin, begin + raw->len, fields->buf, fields->len, found)) {
            result = PyTuple_New(fields->len);
            for (Py_ssize_t i = 0; result != NULL && i < fields->len; i++) {
                PyObject *numbers = numbers_of(&found[i], raw->len >= RELEASE_GIL_BYTES);
                if (numbers == NULL || PyTuple_SetItem(result, i, numbers) != 0) { /* takes over the reference */
                    Py_DECREF(result);
                    result = NULL;
                }
            }
        }
    }
    return answer(&buffers, result);
}
