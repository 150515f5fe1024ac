/* Answer a plain query by converting the serialized request directly into the serialized answer. A query is plain if
 * its documents consist of text and grid segments, its scheme has a plan, and it requests the table or the ids of all
 * tokens. All other queries are parsed into messages.
 */

#include "plan.h"
#include "wire.h"

/* Field numbers; all other fields are declined. */
enum { QUERY_OF_CALL = 1 };
enum { ITEM_ID = 1, QUERY_OF_ITEM = 2 };
enum { SEGMENTS = 1, PROFILE = 4, SCHEME, START, START_PER_DOCUMENT, STRICT, DENSE = 10 };
enum { KINDS = 1, FRAMES, HEIGHTS, WIDTHS, PER_DOCUMENT };
enum { DTYPE = 1, DENSE_AXES };
enum { MAX_FIELD = DENSE };

/* Limits of the service. */
enum { DOCUMENTS, SEGMENT_COUNT, TOKENS, IMAGES, ID_BYTES, ANSWER_BYTES, LIMITS };

#define MAX_KEY 4096 /* maximum size in bytes of profile and scheme */

/* Field of a message: where it begins, including the tag, or NULL if it is absent; its bytes or its number. */
typedef struct {
    const uint8_t *tag;
    Span bytes;
    uint64_t number;
} Field;

/* Read the fields of a message, each of which may occur at most once; return 0 for other field numbers or types. */
static int read_fields(const Span *message, const int8_t *types, Field *fields) {
    const uint8_t *at = message->begin, *end = message->end;
    memset(fields, 0, (MAX_FIELD + 1) * sizeof *fields);
    while (at < end) {
        const uint8_t *tag = at;
        uint64_t head;
        at = varint(at, end, 5, &head);
        if (at == NULL || head >> 3 > MAX_FIELD || types[head >> 3] != (int8_t)(head & 7)) {
            return 0;
        }
        Field *field = &fields[head >> 3];
        at = varint(at, end, 10, &field->number);
        if (at == NULL || field->tag != NULL) {
            return 0;
        }
        field->tag = tag;
        if ((head & 7) == BYTES) {
            if (field->number > (uint64_t)(end - at)) {
                return 0;
            }
            field->bytes = (Span){at, at + field->number};
            at += field->number;
        }
    }
    return 1;
}

static int64_t bytes_of(const Field *field) { return field->tag == NULL ? 0 : field->bytes.end - field->tag; }

/* Return the bytes of the profile and scheme, which by themselves form a valid query; NULL without an exception if they
 * are too long. */
static PyObject *key_of(const Field *query) {
    int64_t profile = bytes_of(&query[PROFILE]), scheme = bytes_of(&query[SCHEME]);
    PyObject *key = profile + scheme > MAX_KEY ? NULL : PyBytes_FromStringAndSize(NULL, profile + scheme);
    if (key != NULL) {
        char *out = PyBytes_AsString(key);
        if (profile > 0) {
            memcpy(out, query[PROFILE].tag, profile);
        }
        if (scheme > 0) {
            memcpy(out + profile, query[SCHEME].tag, scheme);
        }
    }
    return key;
}

/* Settings of a query, from the Python tuple (plan, strict, fractional, label). */
typedef struct {
    PyObject *table; /* an owned reference */
    int strict, frames, separators, fractional;
    const char *label;
    Py_ssize_t label_bytes;
} Settings;

static int read_settings(Buffers *buffers, PyObject *known, Settings *settings, Matrix *plan) {
    if (!PyTuple_Check(known) || PyTuple_Size(known) != 4) {
        return 0;
    }
    char *label;
    PyObject *rules = PyObject_GetAttrString(PyTuple_GetItem(known, 0), "rules");
    settings->table = PyObject_GetAttrString(PyTuple_GetItem(known, 0), "table");
    int fits = rules != NULL && settings->table != NULL && PyTuple_Check(rules) && PyTuple_Size(rules) == 2 &&
               take_matrix(buffers, settings->table, 0, plan) &&
               PyBytes_AsStringAndSize(PyTuple_GetItem(known, 3), &label, &settings->label_bytes) == 0;
    if (fits) {
        settings->strict = PyTuple_GetItem(known, 1) == Py_True;
        settings->fractional = PyTuple_GetItem(known, 2) == Py_True;
        settings->frames = PyTuple_GetItem(rules, 0) == Py_True;
        settings->separators = PyTuple_GetItem(rules, 1) == Py_True;
        settings->label = label;
    }
    Py_XDECREF(rules);
    return fits;
}

/* A batch that owns its memory. */
typedef struct {
    Batch batch;
    Vector starts;
    char *memory;
    int64_t images;
} Placed;

static Matrix rows_at(char *data, int64_t rows, int64_t columns) {
    return (Matrix){data, rows, columns, 8 * columns, 8, 8, 'q'};
}

/* Allocate the arrays of a batch in one block of memory, one after another. */
static int make_room(Placed *placed, int64_t segments, int64_t documents, int64_t starts, int64_t rows) {
    Batch *batch = &placed->batch;
    char *at = placed->memory =
        PyMem_Malloc((size_t)(8 * ((3 + rows) * segments + 5 * documents + 1 + starts) + segments));
    if (at == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    batch->table = rows_at(at, rows, segments);
    batch->documents = rows_at(at += 8 * rows * segments, 4, documents);
    batch->extents = rows_at(at += 8 * 4 * documents, 3, segments);
    batch->offsets = (Vector){at += 8 * 3 * segments, documents + 1, 8};
    placed->starts = (Vector){at += 8 * (documents + 1), starts, 8};
    batch->kind = (Vector){at + 8 * starts, segments, 1};
    return 1;
}

/* Return whether all segments are valid texts and grids; count the grids. */
static int read_kinds(Placed *placed, const Span *kinds, int64_t most_frames) {
    const Batch *batch = &placed->batch;
    int64_t frames = 0;
    placed->images = 0;
    for (int64_t s = 0; s < batch->kind.size; s++) {
        int kind = kinds->begin[s] - 1; /* messages start counting at 1 */
        int64_t height = entry(&batch->extents, 1, s), of_segment = entry(&batch->extents, 0, s);
        if (kind < TEXT || kind > AUDIO || of_segment < 1 || of_segment > INT32_MAX ||
            (kind != GRID && (of_segment != 1 || height != 1))) {
            return 0;
        }
        batch->kind.data[s] = (char)kind;
        frames += of_segment;
        placed->images += kind == GRID;
    }
    return frames <= most_frames;
}

/* Compute the first segment of each document; return 0 if a document has no segments or the total is wrong. */
static int read_documents(const Batch *batch, const Span *per_document) {
    char *firsts = batch->offsets.data;
    int64_t first = 0;
    put_int64(firsts, 0);
    unpack(per_document, firsts + 8);
    for (int64_t d = 1; d < batch->offsets.size; d++) {
        int64_t length = int64_at(firsts + 8 * d);
        if (length < 1 || length > batch->kind.size - first) {
            return 0;
        }
        put_int64(firsts + 8 * d, first += length);
    }
    return first == batch->kind.size;
}

/* Read the segments and starts of a query into a new batch. */
static int read_batch(Placed *placed, const Field *query, const int64_t *most, int64_t rows) {
    static const int8_t types[MAX_FIELD + 1] = {-1, BYTES, BYTES, BYTES, BYTES, BYTES, -1, -1, -1, -1, -1};
    Field fields[MAX_FIELD + 1];
    if (query[SEGMENTS].tag == NULL || !read_fields(&query[SEGMENTS].bytes, types, fields)) {
        return 0;
    }
    int64_t sizes[PER_DOCUMENT + 1];
    for (int i = KINDS; i <= PER_DOCUMENT; i++) {
        sizes[i] = varints(fields[i].bytes.begin, fields[i].bytes.end);
    }
    const Span *starts = &query[START_PER_DOCUMENT].bytes;
    int64_t segments = sizes[KINDS], documents = sizes[PER_DOCUMENT], several = varints(starts->begin, starts->end);
    if (segments < 1 || segments > most[SEGMENT_COUNT] || fields[KINDS].number != (uint64_t)segments ||
        sizes[HEIGHTS] != segments || sizes[WIDTHS] != segments || (sizes[FRAMES] != 0 && sizes[FRAMES] != segments) ||
        documents < 1 || documents > most[DOCUMENTS] ||
        (several != 0 && (several != documents || query[START].tag != NULL)) ||
        !make_room(placed, segments, documents, several, rows)) {
        return 0;
    }
    char *sides = placed->batch.extents.data;
    for (int64_t s = 0; s < segments && sizes[FRAMES] == 0; s++) {
        put_int64(sides + 8 * s, 1);
    }
    unpack(&fields[FRAMES].bytes, sides);
    unpack(&fields[HEIGHTS].bytes, sides + 8 * segments);
    unpack(&fields[WIDTHS].bytes, sides + 16 * segments);
    unpack(starts, placed->starts.data);
    return read_kinds(placed, &fields[KINDS].bytes, most[SEGMENT_COUNT]) &&
           read_documents(&placed->batch, &fields[PER_DOCUMENT].bytes);
}

/* The ids that a query requests. */
typedef struct {
    int64_t rows, itemsize, dtype;
    char format;
    uint8_t axes[MAX_AXES];
} Ids;

enum { DTYPE_INT32 = 2, DTYPE_INT64 = 3, DTYPE_FLOAT64 = 7 };

static int read_ids(const Field *dense, int64_t axes, int fractional, Ids *ids) {
    static const int8_t types[MAX_FIELD + 1] = {-1, VARINT, BYTES, -1, -1, -1, -1, -1, -1, -1, -1};
    Field fields[MAX_FIELD + 1];
    char chosen[8 * MAX_AXES];
    if (!read_fields(&dense->bytes, types, fields)) {
        return 0;
    }
    const Span *asked = &fields[DENSE_AXES].bytes;
    ids->dtype = fields[DTYPE].number != 0 ? (int64_t)fields[DTYPE].number : fractional ? DTYPE_FLOAT64 : DTYPE_INT32;
    ids->format = ids->dtype == DTYPE_INT32 ? 'i' : ids->dtype == DTYPE_INT64 ? 'q' : 'd';
    ids->itemsize = ids->format == 'i' ? 4 : 8;
    ids->rows = varints(asked->begin, asked->end);
    if ((ids->format == 'd' && ids->dtype != DTYPE_FLOAT64) || (fractional && ids->format != 'd') || ids->rows < 0 ||
        ids->rows > MAX_AXES || axes > MAX_IDS) {
        return 0;
    }
    unpack(asked, chosen);
    for (int64_t row = 0; row < ids->rows; row++) {
        int64_t axis = int64_at(chosen + 8 * row);
        if (axis < 0 || axis >= axes) {
            return 0;
        }
        ids->axes[row] = (uint8_t)axis;
    }
    for (int64_t axis = 0; ids->rows == 0 && axis < axes; axis++) {
        ids->axes[axis] = (uint8_t)axis;
    }
    ids->rows = ids->rows == 0 ? axes : ids->rows;
    return 1;
}

static int64_t size_of(uint64_t value) {
    int64_t size = 1;
    for (; value >= 0x80; value >>= 7) {
        size++;
    }
    return size;
}

static char *put_varint(char *at, uint64_t value) {
    for (; value >= 0x80; value >>= 7) {
        *at++ = (char)(value | 0x80);
    }
    *at++ = (char)value;
    return at;
}

/* Write the tag of a field with a number below 16. */
static char *put_tag(char *at, int field, int type) {
    *at++ = (char)(field << 3 | type);
    return at;
}

static char *put_number(char *at, int field, uint64_t value) { return put_varint(put_tag(at, field, VARINT), value); }

static char *put_head(char *at, int field, int64_t size) {
    return put_varint(put_tag(at, field, BYTES), (uint64_t)size);
}

static char *put_bytes(char *at, int field, const char *data, int64_t size) {
    at = put_head(at, field, size);
    memcpy(at, data, size);
    return at + size;
}

static int64_t size_of_bytes(int64_t size) { return 1 + size_of((uint64_t)size) + size; }

/* Return the size in bytes of a row's varints. */
static int64_t size_of_row(const Matrix *matrix, int64_t row) {
    int64_t size = 0;
    for (int64_t i = 0; i < matrix->columns; i++) {
        size += size_of((uint64_t)entry(matrix, row, i));
    }
    return size;
}

static char *put_row(char *at, const Matrix *matrix, int64_t row) {
    for (int64_t i = 0; i < matrix->columns; i++) {
        at = put_varint(at, (uint64_t)entry(matrix, row, i));
    }
    return at;
}

/* Sizes of an answer and its parts. */
typedef struct {
    int64_t inner, data, next, delta, cu, positions, whole;
} Sizes;

static Sizes sizes_of(const Batch *batch, const Ids *ids, const Settings *settings, int item, uint64_t id) {
    Sizes sizes;
    const Matrix *table = &batch->table, *documents = &batch->documents;
    if (ids != NULL) {
        int64_t shape = size_of((uint64_t)ids->rows) + size_of((uint64_t)batch->token);
        sizes.data = ids->rows * batch->token * ids->itemsize;
        sizes.inner = 2 + size_of_bytes(shape) + size_of_bytes(sizes.data);
    } else {
        sizes.data = 8 * table->rows * table->columns;
        sizes.inner = size_of_bytes(sizes.data) + size_of_bytes(8 * 4 * documents->columns) + 1 +
                      size_of((uint64_t)batch->token) + 2 + 2 * settings->fractional +
                      (settings->label_bytes > 0 ? size_of_bytes(settings->label_bytes) : 0);
    }
    sizes.next = size_of_row(documents, NEXT_POSITION);
    sizes.delta = size_of_row(documents, DELTA);
    sizes.cu = size_of_row(documents, FIRST_TOKEN) + size_of((uint64_t)batch->token);
    sizes.positions =
        size_of_bytes(sizes.inner) + size_of_bytes(sizes.next) + size_of_bytes(sizes.delta) + size_of_bytes(sizes.cu);
    sizes.whole = (item && id != 0 ? 1 + size_of(id) : 0) + size_of_bytes(sizes.positions);
    return sizes;
}

/* Write the answer; return the address for the ids, or NULL if there are none. */
static char *put_answer(char *at, const Batch *batch, const Ids *ids, const Settings *settings, const Sizes *sizes,
                        int item, uint64_t id) {
    const Matrix *table = &batch->table, *documents = &batch->documents;
    char *data = NULL;
    if (item && id != 0) {
        at = put_number(at, 1, id);
    }
    at = put_head(at, item ? 2 : 1, sizes->positions);
    at = put_head(at, ids != NULL ? 2 : 1, sizes->inner);
    if (ids != NULL) {
        at = put_number(at, 1, (uint64_t)ids->dtype);
        at = put_head(at, 2, size_of((uint64_t)ids->rows) + size_of((uint64_t)batch->token));
        at = put_varint(put_varint(at, (uint64_t)ids->rows), (uint64_t)batch->token);
        data = at = put_head(at, 3, sizes->data);
        at += sizes->data;
    } else {
        at = put_bytes(at, 1, table->data, sizes->data);
        at = put_bytes(at, 2, documents->data, 8 * 4 * documents->columns);
        at = put_number(at, 3, (uint64_t)batch->token);
        at = put_number(at, 4, (uint64_t)((table->rows - AXES) / 4));
        if (settings->fractional) {
            at = put_number(at, 5, 1);
        }
        if (settings->label_bytes > 0) {
            at = put_bytes(at, 6, settings->label, settings->label_bytes);
        }
    }
    at = put_row(put_head(at, 3, sizes->next), documents, NEXT_POSITION);
    at = put_row(put_head(at, 4, sizes->delta), documents, DELTA);
    at = put_row(put_head(at, 5, sizes->cu), documents, FIRST_TOKEN);
    put_varint(at, (uint64_t)batch->token);
    return data;
}

/* Return the answer for a placed batch; NULL without an exception if it is too large. */
static PyObject *answer_to(const Batch *batch, const Ids *ids, const Settings *settings, const int64_t *most, int item,
                           uint64_t id) {
    if (batch->token > most[TOKENS] || batch->token > INT32_MAX ||
        (ids != NULL && ids->rows * batch->token * ids->itemsize > most[ID_BYTES])) {
        return NULL;
    }
    Sizes sizes = sizes_of(batch, ids, settings, item, id);
    PyObject *result = sizes.whole > most[ANSWER_BYTES] ? NULL : PyBytes_FromStringAndSize(NULL, sizes.whole);
    if (result == NULL) {
        return NULL;
    }
    char *data = put_answer(PyBytes_AsString(result), batch, ids, settings, &sizes, item, id);
    if (data != NULL) {
        Matrix out = {data,          ids->rows,     batch->token, ids->itemsize * batch->token,
                      ids->itemsize, ids->itemsize, ids->format};
        int done;
        if (sizes.data < RELEASE_GIL_BYTES) {
            done = expand_ids(&batch->table, batch->token, &out, ids->axes, 1);
        } else {
            Py_BEGIN_ALLOW_THREADS
                done = expand_ids(&batch->table, batch->token, &out, ids->axes, 1);
            Py_END_ALLOW_THREADS
        }
        if (!done) { /* numerators are not exact as doubles */
            Py_DECREF(result);
            return NULL;
        }
    }
    return result;
}

/* Return the answer to a query with known settings, or its key if a shape is not in the plan. */
static PyObject *serve(Buffers *buffers, const Field *query, PyObject *key, PyObject *known, const int64_t *most,
                       int item, uint64_t id) {
    Placed placed = {.batch.unknown = -1, .memory = NULL};
    Batch *batch = &placed.batch;
    Settings settings = {.table = NULL};
    Ids ids;
    PyObject *result = NULL;
    int dense = query[DENSE].tag != NULL;
    if (read_settings(buffers, known, &settings, &batch->plan)) {
        int64_t axes = axes_of(&batch->plan);
        batch->separated = batch->timed = 0;
        batch->strict = query[STRICT].tag != NULL ? query[STRICT].number != 0 : settings.strict;
        batch->frames = settings.frames;
        batch->separators = settings.separators;
        batch->resumable = batch->audio = 1;
        if (axes <= MAX_AXES && is_plan(&batch->plan, axes) &&
            (!dense || read_ids(&query[DENSE], axes, settings.fractional, &ids)) &&
            read_batch(&placed, query, most, AXES + 4 * axes) && placed.images <= most[IMAGES] &&
            place_batch(batch, placed.starts.size > 0 ? &placed.starts : NULL, (int64_t)query[START].number)) {
            result = answer_to(batch, dense ? &ids : NULL, &settings, most, item, id);
        }
    }
    if (batch->unknown >= 0) {
        result = Py_NewRef(key);
    } else if (result != NULL) {
        PyObject *counted = Py_BuildValue("(NLLL)", result, (long long)batch->documents.columns,
                                          (long long)batch->token, (long long)placed.images);
        result = counted;
    }
    PyMem_Free(placed.memory);
    Py_XDECREF(settings.table);
    return result;
}

/* served(raw, item, known, most) -> (answer, documents, tokens, images), or the bytes of profile and scheme if these
 * or a shape are unknown, or None.
 *
 * raw: serialized request of Place, or of StreamPlace if `item` is true; known: dict from the bytes of profile and
 * scheme to (plan, strict, fractional, label) or None; most: int64 limits on documents, segments, tokens, images, bytes
 * of ids and bytes of the answer; the general code reports queries that exceed these limits. */
PyObject *native_served(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    static const int8_t outer[][MAX_FIELD + 1] = {{-1, BYTES, -1, -1, -1, -1, -1, -1, -1, -1, -1},
                                                  {-1, VARINT, BYTES, -1, -1, -1, -1, -1, -1, -1, -1}};
    static const int8_t inner[MAX_FIELD + 1] = {-1, BYTES, -1, -1, BYTES, BYTES, VARINT, BYTES, VARINT, -1, BYTES};
    Buffers buffers;
    Field request[MAX_FIELD + 1], query[MAX_FIELD + 1];
    PyObject *result = NULL;
    (void)self;
    if (!arguments("served", 4, count)) {
        return NULL;
    }
    buffers.count = 0;
    int item = args[1] == Py_True, field = item ? QUERY_OF_ITEM : QUERY_OF_CALL;
    Py_buffer *raw = take_flat(&buffers, args[0], 'B', 0), *most = take_flat(&buffers, args[3], 'q', 0);
    if (raw == NULL || most == NULL || most->len != 8 * LIMITS || !PyDict_Check(args[2])) {
        return answer(&buffers, NULL);
    }
    Span whole = {raw->buf, (const uint8_t *)raw->buf + raw->len};
    if (read_fields(&whole, outer[item], request) && request[field].tag != NULL &&
        read_fields(&request[field].bytes, inner, query)) {
        PyObject *key = key_of(query), *known = NULL;
        if (key != NULL) {
            known = PyDict_GetItemWithError(args[2], key);
            if (known == NULL && !PyErr_Occurred()) {
                result = Py_NewRef(key);
            } else if (known != NULL) {
                Py_INCREF(known); /* another thread may remove the value from the dict */
                result = serve(&buffers, query, key, known, most->buf, item, item ? request[ITEM_ID].number : 0);
                Py_DECREF(known);
            }
        }
        Py_XDECREF(key);
    }
    return answer(&buffers, result);
}
