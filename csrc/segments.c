/* Build the arrays of a segment table from lists of Text, Audio and Grid or from placeholder spans, and check such
 * arrays. */

#include "native.h"

enum { FRAMES, HEIGHT, WIDTH }; /* rows of extents, columns of grid_thw */

/* Three arrays of a segment table, as new bytes objects that are to be filled. */
typedef struct {
    PyObject *kind, *extents, *offsets;
    uint8_t *kinds;
    char *values, *firsts;
    int64_t segments;
} Shape;

static int new_shape(Shape *shape, int64_t segments, int64_t documents) {
    shape->segments = segments;
    shape->kind = PyBytes_FromStringAndSize(NULL, segments);
    shape->extents = PyBytes_FromStringAndSize(NULL, 3 * 8 * segments);
    shape->offsets = PyBytes_FromStringAndSize(NULL, 8 * (documents + 1));
    if (shape->kind == NULL || shape->extents == NULL || shape->offsets == NULL) {
        return 0;
    }
    shape->kinds = (uint8_t *)PyBytes_AsString(shape->kind);
    shape->values = PyBytes_AsString(shape->extents);
    shape->firsts = PyBytes_AsString(shape->offsets);
    put_int64(shape->firsts, 0);
    return 1;
}

static void drop_shape(Shape *shape) {
    Py_XDECREF(shape->kind);
    Py_XDECREF(shape->extents);
    Py_XDECREF(shape->offsets);
}

static void put_segment(Shape *shape, int64_t at, uint8_t kind, int64_t frames, int64_t height, int64_t width) {
    if (at < shape->segments) { /* false only if another thread has changed the arrays since they were counted */
        shape->kinds[at] = kind;
        put_int64(shape->values + 8 * at, frames);
        put_int64(shape->values + 8 * (shape->segments + at), height);
        put_int64(shape->values + 8 * (2 * shape->segments + at), width);
    }
}

/* Return the value of an int attribute; -1, with no exception set, if it is not an int or is missing. */
static int64_t int_attribute(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    int64_t result = -1;
    if (value != NULL && PyLong_CheckExact(value)) {
        result = PyLong_AsLongLong(value);
    }
    Py_XDECREF(value);
    PyErr_Clear();
    return result;
}

static int is_attribute(PyObject *object, PyObject *name, PyObject *wanted) {
    PyObject *value = PyObject_GetAttr(object, name);
    Py_XDECREF(value);
    PyErr_Clear();
    return value == wanted;
}

/* Classes of parts, and the names of their attributes. */
typedef struct {
    PyObject *text, *audio, *grid;
    PyObject *length, *frames, *height, *width, *row_separator, *seconds_per_frame, *first_frame;
} Names;

static int put_part(Shape *shape, int64_t at, PyObject *part, const Names *names) {
    PyObject *type = (PyObject *)Py_TYPE(part);
    if (type == names->text || type == names->audio) {
        int64_t length = int_attribute(part, names->length);
        put_segment(shape, at, type == names->text ? TEXT : AUDIO, 1, 1, length);
        return tokens_of(1, 1, length, 0) > 0;
    }
    if (type != names->grid || !is_attribute(part, names->row_separator, Py_False) ||
        !is_attribute(part, names->seconds_per_frame, Py_None) || !is_attribute(part, names->first_frame, Py_None)) {
        return 0;
    }
    int64_t frames = int_attribute(part, names->frames), height = int_attribute(part, names->height);
    int64_t width = int_attribute(part, names->width);
    put_segment(shape, at, GRID, frames, height, width);
    return tokens_of(frames, height, width, 0) > 0;
}

/* Write the parts of a document, starting at segment `at`; return their number, or 0 if one is not supported. */
static int64_t put_document(Shape *shape, int64_t at, PyObject *document, const Names *names) {
    int64_t parts = length_of(document);
    int fits = parts >= 1 && at + parts <= shape->segments;
    for (int64_t i = 0; fits && i < parts; i++) {
        PyObject *part = PySequence_GetItem(document, i); /* owned, since other code may change the list */
        fits = part != NULL && put_part(shape, at + i, part, names);
        Py_XDECREF(part);
    }
    return fits ? parts : 0;
}

static int put_documents(Shape *shape, PyObject *documents, int64_t count, const Names *names) {
    int64_t at = 0;
    for (int64_t d = 0; d < count; d++) {
        PyObject *document = PySequence_GetItem(documents, d);
        int64_t parts = document == NULL ? 0 : put_document(shape, at, document, names);
        Py_XDECREF(document);
        if (parts == 0) {
            return 0;
        }
        at += parts;
        put_int64(shape->firsts + 8 * (d + 1), at);
    }
    return at == shape->segments;
}

/* documents(documents, Text, Audio, Grid, names) -> (kind, extents, segment_offsets) as bytes, or None.
 *
 * documents: list of lists of Text, Audio and plain Grid; names: their attribute names, in the order of Names. */
PyObject *native_documents(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 5 || !PyTuple_Check(args[4]) || PyTuple_Size(args[4]) != 7) {
        return PyErr_Format(PyExc_TypeError, "documents takes documents, three classes and seven names");
    }
    int64_t num_documents = length_of(args[0]), segments = 0;
    for (int64_t d = 0; d < num_documents; d++) {
        PyObject *document = PySequence_GetItem(args[0], d);
        int64_t parts = document == NULL ? -1 : length_of(document);
        Py_XDECREF(document);
        if (parts < 1) {
            num_documents = -1;
        }
        segments += parts;
    }
    if (num_documents < 0) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    PyObject *field[7];
    for (int i = 0; i < 7; i++) {
        field[i] = PyTuple_GetItem(args[4], i);
    }
    Names names = {args[1], args[2], args[3], field[0], field[1], field[2], field[3], field[4], field[5], field[6]};
    Shape shape;
    PyObject *result = NULL;
    if (new_shape(&shape, segments, num_documents)) {
        if (put_documents(&shape, args[0], num_documents, &names)) {
            result = PyTuple_Pack(3, shape.kind, shape.extents, shape.offsets);
        } else {
            PyErr_Clear();
            result = Py_NewRef(Py_None);
        }
    }
    drop_shape(&shape);
    return result;
}

/* numbers(list) -> bytes: a list of nonnegative ints as int64, or None. */
PyObject *native_numbers(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (!arguments("numbers", 1, count)) {
        return NULL;
    }
    Py_ssize_t size = PyList_CheckExact(args[0]) ? PyList_Size(args[0]) : -1;
    PyObject *result = size < 0 ? NULL : PyBytes_FromStringAndSize(NULL, 8 * size);
    if (result != NULL) {
        char *out = PyBytes_AsString(result);
        int fits = 1;
        for (Py_ssize_t i = 0; fits && i < size; i++) {
            PyObject *number =
                PyList_GetItem(args[0], i); /* borrowed, since reading ints runs no code that could change the list */
            int64_t value = number != NULL && PyLong_CheckExact(number) ? PyLong_AsLongLong(number) : -1;
            fits = value >= 0; /* -1 means an error */
            put_int64(out + 8 * i, value);
        }
        if (!fits) {
            PyErr_Clear();
            Py_DECREF(result);
            result = NULL;
        }
    }
    return result != NULL || PyErr_Occurred() ? result : Py_NewRef(Py_None);
}

/* Write the segments of documents with spans, or only count them if `shape` is NULL; return -1 for an error. */
static int64_t put_spans(Shape *shape, char *where, const Vector *lengths, const Vector *offsets,
                         const Matrix *grid_thw, const Vector *documents, int64_t separator) {
    int64_t at = 0, span = 0;
    for (int64_t d = 0; d < lengths->size; d++) {
        int64_t token = 0, length = item(lengths, d);
        if (length < 1 || length > INT32_MAX) {
            return -1;
        }
        for (; span < offsets->size && (documents == NULL ? 0 : item(documents, span)) == d; span++) {
            int64_t first = item(offsets, span), frames = entry(grid_thw, span, FRAMES);
            int64_t height = entry(grid_thw, span, HEIGHT), width = entry(grid_thw, span, WIDTH);
            int64_t tokens = tokens_of(frames, height, width, separator);
            if (tokens == 0 || first < token || first > length || first + tokens > length) {
                return -1;
            }
            if (shape != NULL && first > token) {
                put_segment(shape, at, TEXT, 1, 1, first - token);
            }
            at += first > token;
            if (shape != NULL) {
                put_segment(shape, at, GRID, frames, height, width);
                put_int64(where + 8 * span, at);
            }
            at++;
            token = first + tokens;
        }
        if (shape != NULL && length > token) {
            put_segment(shape, at, TEXT, 1, 1, length - token);
        }
        at += length > token;
        if (shape != NULL) {
            put_int64(shape->firsts + 8 * (d + 1), at);
        }
    }
    return span == offsets->size ? at : -1; /* spans left over are not in document order */
}

/* spans(lengths, offsets, grid_thw, documents, separators) -> (kind, extents, segment_offsets, segment of each span)
 * as bytes, or None. Arrays are int64, see SegmentTable.from_spans; documents may be None for one document. */
PyObject *native_spans(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Buffers buffers;
    Vector lengths, offsets, documents;
    Matrix grid_thw;
    PyObject *result = NULL;
    (void)self;
    if (!arguments("spans", 5, count)) {
        return NULL;
    }
    buffers.count = 0;
    int assigned = args[3] != Py_None, separator = args[4] == Py_True;
    if (take_vector(&buffers, args[0], 'q', 0, &lengths) && take_vector(&buffers, args[1], 'q', 0, &offsets) &&
        take_matrix(&buffers, args[2], 0, &grid_thw) &&
        (!assigned || take_vector(&buffers, args[3], 'q', 0, &documents)) && grid_thw.format == 'q' &&
        grid_thw.rows == offsets.size && grid_thw.columns == 3 &&
        (assigned ? documents.size == offsets.size : lengths.size == 1 || offsets.size == 0)) {
        const Vector *owner = assigned ? &documents : NULL;
        int64_t segments = put_spans(NULL, NULL, &lengths, &offsets, &grid_thw, owner, separator);
        PyObject *where = segments < 0 ? NULL : PyBytes_FromStringAndSize(NULL, 8 * offsets.size);
        Shape shape;
        if (where != NULL) {
            if (new_shape(&shape, segments, lengths.size) &&
                put_spans(&shape, PyBytes_AsString(where), &lengths, &offsets, &grid_thw, owner, separator) >= 0) {
                result = PyTuple_Pack(4, shape.kind, shape.extents, shape.offsets, where);
            }
            drop_shape(&shape);
            Py_DECREF(where);
        }
    }
    return answer(&buffers, result);
}

static int sound(const Vector *kind, const Matrix *extents, const Vector *offsets, const Vector *separator) {
    if (extents->format != 'q' || extents->rows != 3 || extents->columns != kind->size || offsets->size < 1 ||
        item(offsets, 0) != 0 || item(offsets, offsets->size - 1) != kind->size ||
        (separator != NULL && separator->size != kind->size)) {
        return 0;
    }
    for (int64_t d = 1; d < offsets->size; d++) {
        if (item(offsets, d) <= item(offsets, d - 1)) {
            return 0;
        }
    }
    for (int64_t s = 0; s < kind->size; s++) {
        uint8_t what = (uint8_t)kind->data[s * kind->stride];
        int64_t frames = entry(extents, 0, s), height = entry(extents, 1, s);
        int64_t extra = separator != NULL && separator->data[s * separator->stride] != 0;
        if (what > AUDIO || (what != GRID && (frames != 1 || height != 1 || extra)) ||
            tokens_of(frames, height, entry(extents, 2, s), extra) == 0) {
            return 0;
        }
    }
    return 1;
}

/* sound(kind, extents, segment_offsets, row_separator) -> bool: True if these are valid arrays of a segment table
 * without clips, thumbnails and tiles. */
PyObject *native_sound(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Buffers buffers;
    Vector kind, offsets, separator;
    Matrix extents;
    (void)self;
    if (!arguments("sound", 4, count)) {
        return NULL;
    }
    buffers.count = 0;
    int separated = args[3] != Py_None;
    int result = take_vector(&buffers, args[0], 'B', 0, &kind) && take_matrix(&buffers, args[1], 0, &extents) &&
                 take_vector(&buffers, args[2], 'q', 0, &offsets) &&
                 (!separated || take_vector(&buffers, args[3], '?', 0, &separator)) &&
                 sound(&kind, &extents, &offsets, separated ? &separator : NULL);
    release(&buffers);
    return PyBool_FromLong(result);
}
