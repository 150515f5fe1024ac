/* Collate examples into the arrays of a batch, either packed in one row or padded to rows of equal length. */

#include <stdlib.h>

#include "table.h"

enum { PATCH = 1, AUDIO_TOKEN = 3, IGNORE_INDEX = -100 }; /* see mmpos/segments/kinds.py and mmpos/data/examples.py */

/* Names of the attributes to read from an example, its sequence, and the positions of that sequence. */
enum {
    SEQUENCE,
    LABELS,
    INPUT_IDS,
    TYPES,
    SPANS,
    GRIDS,
    PATCHES,
    POSITIONS,
    TABLE,
    DOCUMENTS,
    NUM_TOKENS,
    SCHEME,
    FRACTIONAL,
    NAMES
};

/* A document and its columns in the batch. The columns, including padding, begin at `first`; the tokens begin at
 * `start`. */
typedef struct {
    Buffers buffers;
    Vector input_ids, labels;
    const uint8_t *types;
    Matrix spans, grid_thw, table, header;
    int64_t tokens, first, start, stop;
} Document;

/* The first token of each run, and one past its last token. */
typedef struct {
    int64_t *edges;
    int64_t count, room;
} Runs;

/* The examples, their layout, and the sizes of the arrays. */
typedef struct {
    Document *documents;
    int64_t count, tokens, segments, images;
    int64_t rest; /* padding after the last document, which counts as a document */
    int64_t pad_token_id;
    Runs patches, audio;
    PyObject *scheme;                      /* scheme of the first example */
    int alike, fractional, pixels, padded; /* alike: all have the same scheme */
} Batch;

/* The arrays of the result, in order; their buffers are held until every array is filled. */
enum { COLUMNS, HEADER, IDS, TRAINED, TEXT_IDS, CU_SEQLENS, MASK, THW, IMAGES, FEATURES, AUDIOS, HEARD, ARRAYS };

typedef struct {
    Buffers buffers;
    PyObject *empty, *int64, *int32, *array[ARRAYS];
    char *data[ARRAYS];
} Arrays;

/* Allocate the documents of the batch; NULL if memory runs out. */
static void new_documents(Batch *batch) {
    batch->documents = malloc((size_t)batch->count * sizeof *batch->documents);
    for (int64_t i = 0; batch->documents != NULL && i < batch->count; i++) {
        batch->documents[i].buffers.count = 0;
    }
}

static void drop_documents(Batch *batch) {
    for (int64_t i = 0; batch->documents != NULL && i < batch->count; i++) {
        release(&batch->documents[i].buffers);
    }
    free(batch->documents);
}

static PyObject *attribute(PyObject *object, PyObject *name) {
    PyObject *value = object == NULL ? NULL : PyObject_GetAttr(object, name);
    PyErr_Clear();
    return value;
}

static int take_ids(Document *document, PyObject *owner, PyObject *name, Vector *vector) {
    PyObject *value = attribute(owner, name);
    int fits = value != NULL && take_vector(&document->buffers, value, 'q', 0, vector);
    Py_XDECREF(value); /* the buffer holds a reference */
    return fits;
}

static int take_rows(Document *document, PyObject *owner, PyObject *name, Matrix *matrix) {
    PyObject *value = attribute(owner, name);
    int fits = value != NULL && take_matrix(&document->buffers, value, 0, matrix) && matrix->format == 'q';
    Py_XDECREF(value);
    return fits;
}

static int take_types(Document *document, PyObject *sequence, PyObject *name) {
    PyObject *value = attribute(sequence, name);
    Py_buffer *buffer = value == NULL ? NULL : take_flat(&document->buffers, value, 'B', 0);
    Py_XDECREF(value);
    document->types = buffer == NULL ? NULL : buffer->buf;
    return buffer != NULL && buffer->len == document->tokens;
}

/* Return whether the images begin in ascending order within the document. */
static int ascend(const Matrix *spans, int64_t tokens) {
    if (spans->rows > tokens) {
        return 0;
    }
    for (int64_t i = 0; i < spans->rows; i++) {
        if (entry(spans, i, 0) < (i > 0 ? entry(spans, i - 1, 0) : 0) || entry(spans, i, 0) >= tokens) {
            return 0;
        }
    }
    return 1;
}

/* Read the positions of one document. */
static int take_positions(Document *document, PyObject *positions, PyObject *const *names) {
    const Matrix *header = &document->header;
    int64_t tokens;
    return take_placed(&document->buffers, positions, names + TABLE, &document->table, &document->header, &tokens) &&
           tokens == document->tokens && document->table.columns > 0 && header->columns == 1 &&
           entry(header, FIRST_SEGMENT, 0) == 0 && entry(header, FIRST_TOKEN, 0) == 0;
}

/* Record whether the positions have the same scheme as the previous ones, and whether they are fractional. */
static int take_scheme(Batch *batch, PyObject *positions, PyObject *const *names) {
    PyObject *scheme = attribute(positions, names[SCHEME]), *fractional = attribute(positions, names[FRACTIONAL]);
    int fits = scheme != NULL && PyUnicode_Check(scheme) && fractional != NULL && PyBool_Check(fractional);
    if (fits && batch->scheme == NULL) {
        batch->scheme = Py_NewRef(scheme);
        batch->alike = 1;
    }
    batch->alike = fits && batch->alike && PyUnicode_Compare(scheme, batch->scheme) == 0;
    batch->fractional |= fractional == Py_True;
    Py_XDECREF(scheme);
    Py_XDECREF(fractional);
    return fits;
}

static int take_document(Batch *batch, Document *document, PyObject *example, PyObject *const *names) {
    PyObject *sequence = attribute(example, names[SEQUENCE]);
    PyObject *positions = attribute(sequence, names[POSITIONS]), *patches = attribute(sequence, names[PATCHES]);
    int fits = take_ids(document, sequence, names[INPUT_IDS], &document->input_ids) &&
               take_ids(document, example, names[LABELS], &document->labels);
    document->tokens = fits ? document->input_ids.size : 0;
    fits = fits && document->tokens > 0 && document->tokens <= INT32_MAX && document->labels.size == document->tokens &&
           take_types(document, sequence, names[TYPES]) &&
           take_rows(document, sequence, names[SPANS], &document->spans) && document->spans.columns == 2 &&
           take_rows(document, sequence, names[GRIDS], &document->grid_thw) && document->grid_thw.columns == 3 &&
           document->grid_thw.rows == document->spans.rows && ascend(&document->spans, document->tokens) &&
           patches != NULL && take_positions(document, positions, names) && take_scheme(batch, positions, names);
    batch->pixels |= patches != Py_None;
    Py_XDECREF(patches);
    Py_XDECREF(positions);
    Py_XDECREF(sequence);
    return fits;
}

/* Read the examples of a list; return 0 if one does not match the others. */
static int take_documents(Batch *batch, PyObject *examples, PyObject *const *names) {
    for (int64_t i = 0; i < batch->count; i++) {
        PyObject *example = PySequence_GetItem(examples, i);
        int fits = take_document(batch, &batch->documents[i], example, names);
        Py_XDECREF(example);
        PyErr_Clear();
        if (!fits || batch->documents[i].table.rows != batch->documents[0].table.rows) {
            return 0;
        }
        batch->images += batch->documents[i].spans.rows;
    }
    return 1;
}

/* Lay out the documents; return 0 if one exceeds the length or the number of tokens exceeds int32. */
static int lay_out(Batch *batch, int64_t multiple, int64_t length, int left) {
    int64_t longest = 0;
    for (int64_t i = 0; i < batch->count; i++) {
        longest = batch->documents[i].tokens > longest ? batch->documents[i].tokens : longest;
    }
    for (int64_t i = 0; i < batch->count; i++) {
        Document *document = &batch->documents[i];
        int64_t tokens = document->tokens, least = batch->padded ? longest : tokens;
        int64_t room = batch->padded && length ? length : (least + multiple - 1) / multiple * multiple;
        document->first = batch->tokens;
        document->stop = batch->tokens + room; /* at most 3 * 2**31 */
        document->start = left ? document->stop - tokens : document->first;
        batch->tokens = document->stop;
        batch->segments += document->table.columns + (room > tokens);
        if (room < tokens || batch->tokens > INT32_MAX) {
            return 0;
        }
    }
    if (!batch->padded && length) {
        batch->rest = length - batch->tokens;
        batch->segments += batch->rest > 0;
        batch->tokens = length;
    }
    return batch->rest >= 0;
}

/* Add a run, or extend the last run if it ends at `first` and `joins` is set; return 0 if memory runs out. */
static int add_run(Runs *runs, int64_t first, int64_t stop, int joins) {
    if (joins && runs->count > 0 && runs->edges[2 * runs->count - 1] == first) {
        runs->edges[2 * runs->count - 1] = stop;
        return 1;
    }
    if (runs->count == runs->room) {
        int64_t room = 2 * runs->room + 32;
        int64_t *edges = realloc(runs->edges, (size_t)room * 2 * sizeof *edges);
        if (edges == NULL) {
            return 0;
        }
        runs->edges = edges;
        runs->room = room;
    }
    runs->edges[2 * runs->count] = first;
    runs->edges[2 * runs->count + 1] = stop;
    runs->count++;
    return 1;
}

/* Add tokens i to stop of a document, all of them patches, as runs that are split where images begin. */
static int add_patches(Batch *batch, const Document *document, int64_t i, int64_t stop, int64_t *image) {
    const Matrix *spans = &document->spans;
    for (int64_t next; i < stop; i = next) {
        int begins = 0;
        for (; *image < spans->rows && entry(spans, *image, 0) <= i; ++*image) {
            begins = entry(spans, *image, 0) == i;
        }
        next = *image < spans->rows && entry(spans, *image, 0) < stop ? entry(spans, *image, 0) : stop;
        if (next <= i || !add_run(&batch->patches, document->start + i, document->start + next, !begins)) {
            return 0; /* next <= i only if another thread writes to the spans */
        }
    }
    return 1;
}

/* Find the runs of patches and of audio; return 0 if memory runs out. */
static int find_runs(Batch *batch) {
    for (const Document *document = batch->documents; document < batch->documents + batch->count; document++) {
        const uint8_t *types = document->types;
        int64_t image = 0;
        for (int64_t i = 0, stop; i < document->tokens; i = stop) {
            uint64_t type = types[i], eight;
            for (stop = i + 1; document->tokens - stop >= 8; stop += 8) {
                memcpy(&eight, types + stop, 8);
                if (eight != type * 0x0101010101010101u) {
                    break;
                }
            }
            while (stop < document->tokens && types[stop] == type) {
                stop++;
            }
            if ((type == PATCH && !add_patches(batch, document, i, stop, &image)) ||
                (type == AUDIO_TOKEN && !add_run(&batch->audio, document->start + i, document->start + stop, 1))) {
                return 0;
            }
        }
    }
    return 1;
}

/* Create an array of shape (rows, columns), or (columns,) if rows is -1. */
static int make(Arrays *arrays, int which, PyObject *dtype, int64_t rows, int64_t columns) {
    PyObject *shape =
        rows < 0 ? PyLong_FromLongLong(columns) : Py_BuildValue("(LL)", (long long)rows, (long long)columns);
    if (shape != NULL) {
        arrays->array[which] = PyObject_CallFunctionObjArgs(arrays->empty, shape, dtype, NULL);
        Py_DECREF(shape);
    }
    if (arrays->array[which] == NULL) {
        return 0;
    }
    char format = dtype == arrays->int32 ? 'i' : 'q';
    Py_buffer *buffer = take_flat(&arrays->buffers, arrays->array[which], format, PyBUF_WRITABLE);
    arrays->data[which] = buffer == NULL ? NULL : buffer->buf;
    return buffer != NULL && buffer->len == (rows < 0 ? 1 : rows) * columns * buffer->itemsize;
}

/* Create all arrays of a batch; return 0 with an exception if memory runs out. */
static int make_arrays(Arrays *arrays, const Batch *batch) {
    PyObject *int64 = arrays->int64;
    int64_t rows = batch->padded ? batch->count : -1,
            columns = batch->padded ? batch->tokens / batch->count : batch->tokens;
    int64_t documents = batch->count + (batch->rest > 0);
    return make(arrays, COLUMNS, int64, batch->documents[0].table.rows, batch->segments) &&
           make(arrays, HEADER, int64, 4, documents) && make(arrays, IDS, int64, rows, columns) &&
           make(arrays, TRAINED, int64, rows, columns) && make(arrays, TEXT_IDS, arrays->int32, rows, columns) &&
           make(arrays, CU_SEQLENS, arrays->int32, -1, documents + 1) &&
           (!batch->padded || make(arrays, MASK, int64, rows, columns)) && make(arrays, THW, int64, batch->images, 3) &&
           make(arrays, IMAGES, int64, batch->patches.count, 2) &&
           make(arrays, FEATURES, int64, batch->patches.count, 2) &&
           (batch->audio.count == 0 ||
            (make(arrays, AUDIOS, int64, batch->audio.count, 2) && make(arrays, HEARD, int64, batch->audio.count, 2)));
}

static void fill(char *out, int64_t first, int64_t stop, int64_t value) {
    for (int64_t i = first; i < stop; i++) {
        put_int64(out + 8 * i, value);
    }
}

static void copy(char *out, int64_t at, const char *values, int64_t stride, int64_t count) {
    if (stride == 8) {
        memcpy(out + 8 * at, values, (size_t)count * 8);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        put_int64(out + 8 * (at + i), int64_at(values + i * stride));
    }
}

/* Number the tokens of a document and the padding after it; padding before it gets 0. */
static void number(char *text_ids, int64_t first, int64_t start, int64_t stop) {
    int32_t *out = (int32_t *)(void *)text_ids;
    memset(out + first, 0, (size_t)(start - first) * 4);
    for (int32_t i = 0; i < stop - start; i++) {
        out[start + i] = i;
    }
}

static Matrix matrix_of(char *data, int64_t rows, int64_t columns) {
    return (Matrix){data, rows, columns, 8 * columns, 8, 8, 'q'};
}

static void put_padding(const Matrix *columns, int64_t at, int64_t token, int64_t count) {
    put_entry(columns, OFFSET, at, token);
    put_entry(columns, SKIP, at, 0);
    put_text(columns, at, count, 0, 0);
}

/* Write the columns of a table, padding included, from column `at`, and the columns of its documents from column `d`;
 * return the column after the last one of the table. */
static int64_t put_positions(const Matrix *columns, const Matrix *header, int64_t at, int64_t d,
                             const Document *document) {
    const Matrix *table = &document->table, *own = &document->header;
    int64_t end = document->start + document->tokens;
    for (int64_t i = 0; i < own->columns; i++) {
        put_entry(header, FIRST_SEGMENT, d + i, plus(at, entry(own, FIRST_SEGMENT, i)));
        put_entry(header, FIRST_TOKEN, d + i, plus(document->first, entry(own, FIRST_TOKEN, i)));
        put_entry(header, NEXT_POSITION, d + i, entry(own, NEXT_POSITION, i));
        put_entry(header, DELTA, d + i, entry(own, DELTA, i));
    }
    if (document->start > document->first) {
        put_padding(columns, at++, document->first, document->start - document->first);
    }
    for (int64_t row = 0; row < table->rows; row++) {
        copy(columns->data + row * columns->row_stride, at, table->data + row * table->row_stride, table->column_stride,
             table->columns);
    }
    for (int64_t s = at; s < at + table->columns; s++) {
        put_entry(columns, OFFSET, s, plus(entry(columns, OFFSET, s), document->start));
    }
    at += table->columns;
    if (document->stop > end) {
        put_padding(columns, at++, end, document->stop - end);
    }
    return at;
}

/* Write the tokens of a document and the padding around them. */
static void put_tokens(Arrays *arrays, const Batch *batch, const Document *document) {
    int64_t first = document->first, start = document->start, end = start + document->tokens, stop = document->stop;
    char *ids = arrays->data[IDS], *labels = arrays->data[TRAINED], *mask = arrays->data[MASK];
    fill(ids, first, start, batch->pad_token_id);
    copy(ids, start, document->input_ids.data, document->input_ids.stride, document->tokens);
    fill(ids, end, stop, batch->pad_token_id);
    fill(labels, first, start + 1, IGNORE_INDEX); /* no token predicts the first one */
    copy(labels, start + 1, document->labels.data + document->labels.stride, document->labels.stride,
         document->tokens - 1);
    fill(labels, end, stop, IGNORE_INDEX);
    number(arrays->data[TEXT_IDS], first, start, stop);
    if (mask != NULL) {
        fill(mask, first, start, 0);
        fill(mask, start, end, 1);
        fill(mask, end, stop, 0);
    }
}

static void put_runs(const Runs *runs, char *spans, char *features) {
    int64_t before = 0;
    for (int64_t i = 0; i < 2 * runs->count; i += 2) {
        put_int64(spans + 8 * i, runs->edges[i]);
        put_int64(spans + 8 * (i + 1), runs->edges[i + 1]);
        put_int64(features + 8 * i, before);
        before += runs->edges[i + 1] - runs->edges[i];
        put_int64(features + 8 * (i + 1), before);
    }
}

static void put_all(Arrays *arrays, const Batch *batch) {
    int64_t documents = batch->count + (batch->rest > 0), at = 0, image = 0;
    int32_t *cu_seqlens = (int32_t *)(void *)arrays->data[CU_SEQLENS];
    Matrix columns = matrix_of(arrays->data[COLUMNS], batch->documents[0].table.rows, batch->segments);
    Matrix header = matrix_of(arrays->data[HEADER], 4, documents);
    for (int64_t i = 0; i < batch->count; i++) {
        const Document *document = &batch->documents[i];
        cu_seqlens[i] = (int32_t)document->first;
        at = put_positions(&columns, &header, at, i, document);
        put_tokens(arrays, batch, document);
        for (int64_t row = 0; row < document->grid_thw.rows; row++, image++) {
            copy(arrays->data[THW], 3 * image, document->grid_thw.data + row * document->grid_thw.row_stride,
                 document->grid_thw.column_stride, 3);
        }
    }
    if (batch->rest) { /* continues the numbering of the first document */
        int64_t first = batch->tokens - batch->rest;
        cu_seqlens[batch->count] = (int32_t)first;
        put_padding(&columns, at, first, batch->rest);
        put_entry(&header, FIRST_SEGMENT, batch->count, at);
        put_entry(&header, FIRST_TOKEN, batch->count, first);
        put_entry(&header, NEXT_POSITION, batch->count, entry(&header, NEXT_POSITION, 0));
        put_entry(&header, DELTA, batch->count, entry(&header, DELTA, 0));
        fill(arrays->data[IDS], first, batch->tokens, batch->pad_token_id);
        fill(arrays->data[TRAINED], first, batch->tokens, IGNORE_INDEX);
        number(arrays->data[TEXT_IDS], first, first, batch->tokens);
    }
    cu_seqlens[documents] = (int32_t)batch->tokens;
    put_runs(&batch->patches, arrays->data[IMAGES], arrays->data[FEATURES]);
    put_runs(&batch->audio, arrays->data[AUDIOS], arrays->data[HEARD]);
}

/* Read the layout arguments; return 0 if one is wrong. */
static int take_layout(Batch *batch, PyObject *const *args, int64_t *numbers) {
    for (int i = 0; i < 3; i++) {
        numbers[i] = args[i] == Py_None ? 0 : PyLong_CheckExact(args[i]) ? PyLong_AsLongLong(args[i]) : -1;
        PyErr_Clear();
    }
    batch->pad_token_id = numbers[2];
    return numbers[0] > 0 && numbers[0] <= INT32_MAX && numbers[1] >= 0 && numbers[1] <= INT32_MAX && numbers[2] >= 0;
}

static PyObject *collated(Batch *batch, Arrays *arrays) {
    int found, large = batch->tokens > RELEASE_GIL_BYTES / 8;
    if (large) {
        Py_BEGIN_ALLOW_THREADS
            found = find_runs(batch);
        Py_END_ALLOW_THREADS
    } else {
        found = find_runs(batch);
    }
    if (!found || !make_arrays(arrays, batch)) {
        return NULL;
    }
    if (large) {
        Py_BEGIN_ALLOW_THREADS
            put_all(arrays, batch);
        Py_END_ALLOW_THREADS
    } else {
        put_all(arrays, batch);
    }
    PyObject *result = PyTuple_New(ARRAYS + 3);
    for (int i = 0; result != NULL && i < ARRAYS; i++) {
        PyTuple_SetItem(result, i, Py_NewRef(arrays->array[i] == NULL ? Py_None : arrays->array[i]));
    }
    if (result != NULL) {
        PyTuple_SetItem(result, ARRAYS, Py_NewRef(batch->alike ? batch->scheme : Py_None));
        PyTuple_SetItem(result, ARRAYS + 1, PyBool_FromLong(batch->fractional));
        PyTuple_SetItem(result, ARRAYS + 2, PyBool_FromLong(batch->pixels));
    }
    return result;
}

/* collate(examples, names, makers, multiple_of, length, pad_token_id, side) -> (arrays, two booleans) or None.
 *
 * examples: list; names: attributes to read; makers: numpy's empty, int64 and int32; length: int or None; side: where
 * rows of equal length are padded, "right" or "left", or None for a single row. The arrays are those of `_Arrays` in
 * mmpos/data/collate.py; the mask is None for a single row, and the audio arrays are None without audio. */
PyObject *native_collate(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    PyObject *names[NAMES], *result = NULL;
    Batch batch = {0};
    Arrays arrays = {0};
    int64_t numbers[3];
    (void)self;
    if (!arguments("collate", 7, count)) {
        return NULL;
    }
    batch.count = length_of(args[0]);
    if (batch.count < 1 || batch.count > INT32_MAX || !PyTuple_Check(args[1]) || PyTuple_Size(args[1]) != NAMES ||
        !PyTuple_Check(args[2]) || PyTuple_Size(args[2]) != 3 || !take_layout(&batch, args + 3, numbers)) {
        Py_RETURN_NONE;
    }
    for (int i = 0; i < NAMES; i++) {
        names[i] = PyTuple_GetItem(args[1], i);
    }
    arrays.empty = PyTuple_GetItem(args[2], 0);
    arrays.int64 = PyTuple_GetItem(args[2], 1);
    arrays.int32 = PyTuple_GetItem(args[2], 2);
    batch.padded = args[6] != Py_None;
    new_documents(&batch);
    int left = batch.padded && PyUnicode_Check(args[6]) && PyUnicode_CompareWithASCIIString(args[6], "left") == 0;
    if (batch.documents != NULL && take_documents(&batch, args[0], names) &&
        lay_out(&batch, numbers[0], numbers[1], left)) {
        result = collated(&batch, &arrays);
    }
    drop_documents(&batch);
    for (int i = 0; i < ARRAYS; i++) {
        Py_XDECREF(arrays.array[i]);
    }
    Py_XDECREF(batch.scheme);
    free(batch.patches.edges);
    free(batch.audio.edges);
    return answer(&arrays.buffers, result);
}
