/* Count the elements of a message in protobuf's wire format before it is parsed: a parser creates an object for every
 * few bytes, holds the interpreter lock throughout, and cannot be stopped. */

#include "wire.h"

#define MAX_DEPTH 100 /* nested messages and groups, as in protobuf's own parsers */

/* Entries of a schema, see mmpos/rpc/elements.py; an entry > 0 is 1 + the type of a submessage. */
enum {
    PLAIN = 0,
    VARINTS = -1
}; /* VARINTS, -4 and -8: field of packed varints or of packed 4-byte or 8-byte numbers */

typedef struct {
    const uint8_t *end;
    uint32_t group; /* field of a group, or 0 for a message */
    int32_t type;   /* row of the schema, or -1 if the type is unknown */
} Level;

/* Return the number of packed numbers in these bytes: -1 if the bytes are malformed, any number above `room` if there
 * are more than `room`. */
static int64_t packed(const uint8_t *at, int64_t size, int32_t entry, int64_t room) {
    if (entry == VARINTS) {
        return size / 10 > room ? room + 1 : varints(at, at + size);
    }
    return size % -entry == 0 ? size / -entry : -1;
}

/* Count the fields and packed numbers of a message, up to one more than `most`; return -1 for malformed bytes. */
static int64_t count_elements(const uint8_t *at, int64_t size, const int32_t *schema, int64_t width, int64_t most) {
    Level levels[MAX_DEPTH + 1] = {{at + size, 0, 0}}, *level = levels;
    int64_t count = 0;
    for (;;) {
        while (at == level->end) {
            if (level->group != 0) {
                return -1;
            }
            if (level == levels) {
                return count;
            }
            level--;
        }
        uint64_t tag, value;
        at = varint(at, level->end, 5, &tag);
        uint32_t field = (uint32_t)(tag >> 3);
        if (at == NULL || tag > UINT32_MAX || field == 0) {
            return -1;
        }
        if (++count > most) {
            return count;
        }
        int kind = (int)(tag & 7);
        if (kind == VARINT) {
            at = varint(at, level->end, 10, &value);
        } else if (kind == FIXED64 || kind == FIXED32) {
            int64_t length = kind == FIXED64 ? 8 : 4;
            at = level->end - at >= length ? at + length : NULL;
        } else if (kind == BYTES) {
            at = varint(at, level->end, 10, &value);
            if (at == NULL || value > (uint64_t)(level->end - at)) {
                return -1;
            }
            int32_t entry = level->type >= 0 && field < width ? schema[level->type * width + field] : PLAIN;
            if (entry > 0) {
                if (level == levels + MAX_DEPTH) {
                    return -1;
                }
                *++level = (Level){at + value, 0, entry - 1};
                continue;
            }
            if (entry != PLAIN) {
                int64_t numbers = packed(at, (int64_t)value, entry, most - count);
                if (numbers < 0) {
                    return -1;
                }
                count += numbers;
                if (count > most) {
                    return most + 1;
                }
            }
            at += value;
        } else if (kind == BEGIN_GROUP) {
            if (level == levels + MAX_DEPTH) {
                return -1;
            }
            level++;
            *level = (Level){level[-1].end, field, -1};
        } else if (kind != END_GROUP || level->group != field) {
            return -1;
        } else {
            level--;
        }
        if (at == NULL) {
            return -1;
        }
    }
}

/* Return whether all entries of a schema are valid. */
static int sound(const int32_t *schema, int64_t types, int64_t width) {
    for (int64_t i = 0; i < types * width; i++) {
        int32_t entry = schema[i];
        if (entry > types || (entry < VARINTS && entry != -4 && entry != -8)) {
            return 0;
        }
    }
    return 1;
}

/* elements(raw, schema, most) -> int: the number of fields and packed numbers of a message, counted up to one more than
 * `most`; -1 for malformed bytes; or None.
 *
 * raw: bytes; schema: (types, width) contiguous int32, with the message itself in row 0. */
PyObject *native_elements(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Buffers buffers;
    Py_buffer *raw, *schema;
    (void)self;
    if (!arguments("elements", 3, count)) {
        return NULL;
    }
    int64_t most = PyLong_AsLongLong(args[2]);
    if (most == -1 && PyErr_Occurred()) {
        return NULL;
    }
    buffers.count = 0;
    if (most < 0 || (raw = take_flat(&buffers, args[0], 'B', 0)) == NULL ||
        (schema = take_flat(&buffers, args[1], 'i', 0)) == NULL || schema->ndim != 2 || schema->shape[0] < 1 ||
        schema->shape[0] > INT32_MAX || !sound(schema->buf, schema->shape[0], schema->shape[1])) {
        return answer(&buffers, NULL);
    }
    int64_t found;
    if (raw->len < RELEASE_GIL_BYTES) {
        found = count_elements(raw->buf, raw->len, schema->buf, schema->shape[1], most);
    } else {
        Py_BEGIN_ALLOW_THREADS
            found = count_elements(raw->buf, raw->len, schema->buf, schema->shape[1], most);
        Py_END_ALLOW_THREADS
    }
    return answer(&buffers, PyLong_FromLongLong(found));
}

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
enum { KINDS, FRAMES, HEIGHTS, WIDTHS, PER_DOCUMENT, SECONDS, SEGMENT_FIELDS = 8 };

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
 * raw: a message of segments as an encoder writes it, without times, separators and extra tokens. The arrays must then
 * be checked with `sound`. */
PyObject *native_segments(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    static const uint8_t numbers[SEGMENT_FIELDS] = {1, 2, 3, 4, 5, 6, 7, 8};
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
