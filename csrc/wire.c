/* Read lists of numbers from messages in protobuf's wire format, and join the pieces of a message. */

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

/* Fields of a message of segments; Python reads messages that have SECONDS or a later field. */
enum { KINDS, FRAMES, HEIGHTS, WIDTHS, PER_DOCUMENT, SECONDS, SEGMENT_FIELDS = 10 };

/* Write the kinds of segments, counted from 1 in messages, as bytes counted from 0; return 0 if one does not fit. */
static int unpack_kinds(const Span *span, char *out) {
    for (const uint8_t *at = span->begin; at < span->end; at++) {
        if (*at == 0 || *at >= 0x80) {
            return 0;
        }
        *out++ = (char)(*at - 1);
    }
    return 1;
}

/* segments(raw) -> (kind, extents, segment_offsets) as bytes, or None.
 *
 * raw: a message of segments as an encoder writes it, with its first five fields alone. The arrays must then
 * be checked with `sound`. */
PyObject *native_segments(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    static const uint8_t numbers[SEGMENT_FIELDS] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
    Buffers buffers;
    Span found[SEGMENT_FIELDS] = {{NULL, NULL}};
    int64_t sizes[SEGMENT_FIELDS];
    PyObject *result = NULL;
    (void)self;
    if (!arguments("segments", 1, count)) {
        return NULL;
    }
    buffers.count = 0;
    Py_buffer *raw = take_flat(&buffers, args[0], 'B', 0);
    int known = raw != NULL && find_fields(raw->buf, (uint8_t *)raw->buf + raw->len, numbers, SEGMENT_FIELDS, found);
    for (int i = 0; known && i < SEGMENT_FIELDS; i++) {
        sizes[i] = varints(found[i].begin, found[i].end);
        known = i < SECONDS ? sizes[i] >= 0 : found[i].begin == NULL;
    }
    if (!known || sizes[KINDS] == 0 || (sizes[FRAMES] != 0 && sizes[FRAMES] != sizes[KINDS]) ||
        sizes[HEIGHTS] != sizes[KINDS] || sizes[WIDTHS] != sizes[KINDS]) {
        return answer(&buffers, NULL);
    }
    Py_ssize_t row = 8 * sizes[KINDS];
    PyObject *kind = PyBytes_FromStringAndSize(NULL, sizes[KINDS]);
    PyObject *extents = PyBytes_FromStringAndSize(NULL, 3 * row);
    PyObject *offsets = PyBytes_FromStringAndSize(NULL, 8 * (sizes[PER_DOCUMENT] + 1));
    if (kind != NULL && extents != NULL && offsets != NULL && unpack_kinds(&found[KINDS], PyBytes_AsString(kind))) {
        char *sides = PyBytes_AsString(extents), *firsts = PyBytes_AsString(offsets);
        for (Py_ssize_t at = 0; at < row && sizes[FRAMES] == 0; at += 8) {
            put_int64(sides + at, 1);
        }
        unpack(&found[FRAMES], sides);
        unpack(&found[HEIGHTS], sides + row);
        unpack(&found[WIDTHS], sides + 2 * row);
        unpack(&found[PER_DOCUMENT], firsts + 8);
        uint64_t first = 0, length;
        put_int64(firsts, 0);
        for (int64_t d = 1; d <= sizes[PER_DOCUMENT]; d++) {
            memcpy(&length, firsts + 8 * d, 8);
            first += length; /* wraps around only for input that `sound` rejects */
            put_int64(firsts + 8 * d, (int64_t)first);
        }
        result = PyTuple_Pack(3, kind, extents, offsets);
    }
    Py_XDECREF(kind);
    Py_XDECREF(extents);
    Py_XDECREF(offsets);
    return answer(&buffers, result);
}

/* joined(parts) -> bytes: the concatenation of a tuple of contiguous buffers; or None. */
PyObject *native_joined(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    PyObject *result = NULL;
    (void)self;
    if (!arguments("joined", 1, count)) {
        return NULL;
    }
    Py_ssize_t parts = PyTuple_Check(args[0]) ? PyTuple_Size(args[0]) : -1, taken = 0, size = 0;
    Py_buffer *buffers = PyMem_Calloc(parts > 0 ? parts : 1, sizeof *buffers);
    if (buffers == NULL) {
        return PyErr_NoMemory();
    }
    while (taken < parts && PyObject_GetBuffer(PyTuple_GetItem(args[0], taken), &buffers[taken], PyBUF_SIMPLE) == 0) {
        size += buffers[taken++].len;
    }
    if (taken == parts) {
        result = PyBytes_FromStringAndSize(NULL, size);
        char *out = result == NULL ? NULL : PyBytes_AsString(result);
        if (out != NULL) {
            Py_BEGIN_ALLOW_THREADS
                for (Py_ssize_t i = 0; i < parts; out += buffers[i++].len) {
                    if (buffers[i].len > 0) { /* an empty buffer may have no address */
                        memcpy(out, buffers[i].buf, buffers[i].len);
                    }
                }
            Py_END_ALLOW_THREADS
        }
    } else {
        PyErr_Clear();
    }
    while (taken > 0) {
        PyBuffer_Release(&buffers[--taken]);
    }
    PyMem_Free(buffers);
    return result != NULL || PyErr_Occurred() ? result : Py_NewRef(Py_None);
}
