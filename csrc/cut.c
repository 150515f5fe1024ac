/* Cut ranges of tokens out of a table, with text or padding around them, in one pass over the segments of the ranges,
 * and concatenate the documents of tables. mmpos/positions/table_rows.py cuts segment by segment. */

#include <stdlib.h>

#include "table.h"

enum { LAYOUT_CONTIGUOUS = 1, LAYOUT_SEQUENCE = 2 }; /* bits of a layout index */

/* An argument: a vector with one number per document or range, or a single number for all (the vector's size is then
 * -1). */
typedef struct {
    Vector vector; /* no data if the argument is None */
    int64_t one;
    PyObject *room; /* owns the numbers read from a list */
} Numbers;

typedef struct {
    Matrix table, documents; /* source */
    Matrix cut, header;      /* result; no data while segments are counted */
    int64_t tokens, segments, length,
        opened;   /* tokens of the source; segments, tokens and documents of the result so far */
    int64_t near; /* the segment found last */
} Cut;

/* Return the last segment that begins at or before a token, searching from the previous result because most ranges
 * ascend. */
static int64_t segment_at(Cut *cut, int64_t token) {
    int64_t low = cut->near, step = 1, count = cut->table.columns;
    if (entry(&cut->table, OFFSET, low) > token) {
        low = 0;
    }
    while (low + step < count && entry(&cut->table, OFFSET, low + step) <= token) {
        low += step;
        step *= 2;
    }
    int64_t high = low + step < count ? low + step : count;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (entry(&cut->table, OFFSET, middle) <= token) {
            low = middle;
        } else {
            high = middle;
        }
    }
    cut->near = low;
    return low;
}

static void copy_columns(Cut *cut, int64_t first, int64_t count) {
    for (int64_t row = 0; row < cut->table.rows; row++) {
        const char *from = cut->table.data + row * cut->table.row_stride + first * cut->table.column_stride;
        char *to = cut->cut.data + row * cut->cut.row_stride + cut->segments * 8;
        if (count > 8 && cut->table.column_stride == 8) {
            memcpy(to, from, (size_t)(8 * count));
            continue;
        }
        for (int64_t i = 0; i < count; i++, from += cut->table.column_stride) {
            put_int64(to + 8 * i, int64_at(from));
        }
    }
}

/* Append tokens start to stop of the source; return 0 if the source does not contain them. */
static int put_range(Cut *cut, int64_t start, int64_t stop) {
    if (start < 0 || stop < start || stop > cut->tokens || (start < stop && cut->table.columns == 0)) {
        return 0;
    }
    if (start == stop) {
        return 1;
    }
    int64_t first = segment_at(cut, start), count = segment_at(cut, stop - 1) - first + 1, at = cut->segments;
    if (count < 1) {
        return 0;
    }
    if (cut->cut.data != NULL) {
        if (at + count > cut->cut.columns) {
            return 0;
        }
        copy_columns(cut, first, count);
        for (int64_t i = 0; i < count; i++) {
            put_entry(&cut->cut, OFFSET, at + i, plus(entry(&cut->cut, OFFSET, at + i), minus(cut->length, start)));
        }
        int64_t inside = minus(cut->length, entry(&cut->cut, OFFSET, at));
        put_entry(&cut->cut, SKIP, at, plus(entry(&cut->cut, SKIP, at), inside));
        put_entry(&cut->cut, OFFSET, at, cut->length);
    }
    cut->segments += count;
    cut->length = plus(cut->length, stop - start);
    return 1;
}

/* Append a run of text that begins at an id, or a run of padding, for which id and step are 0. */
static int put_run(Cut *cut, int64_t tokens, int64_t id, int64_t step) {
    if (tokens == 0) {
        return 1;
    }
    if (cut->cut.data != NULL) {
        if (cut->segments >= cut->cut.columns) {
            return 0;
        }
        const Matrix table = cut->cut; /* a local copy, so that stores cannot alias it */
        put_entry(&table, OFFSET, cut->segments, cut->length);
        put_entry(&table, SKIP, cut->segments, 0);
        put_text(&table, cut->segments, tokens, id, step);
    }
    cut->segments++;
    cut->length = plus(cut->length, tokens);
    return 1;
}

/* Begin the next document of the result, with the next position and delta of the source's document d. */
static void open_document(Cut *cut, int64_t segment, int64_t token, int64_t d) {
    if (cut->header.data != NULL && cut->opened < cut->header.columns) {
        put_entry(&cut->header, FIRST_SEGMENT, cut->opened, segment);
        put_entry(&cut->header, FIRST_TOKEN, cut->opened, token);
        put_entry(&cut->header, NEXT_POSITION, cut->opened, entry(&cut->documents, NEXT_POSITION, d));
        put_entry(&cut->header, DELTA, cut->opened, entry(&cut->documents, DELTA, d));
    }
    cut->opened++;
}

static int64_t length_of_document(const Cut *cut, int64_t d) {
    const Matrix *documents = &cut->documents;
    int64_t stop = d + 1 < documents->columns ? entry(documents, FIRST_TOKEN, d + 1) : cut->tokens;
    return minus(stop, entry(documents, FIRST_TOKEN, d));
}

/* Append tokens start to stop in their own documents; return 0 if one is before the last document with tokens. */
static int put_across(Cut *cut, int64_t start, int64_t stop) {
    const Matrix *documents = &cut->documents;
    int64_t segments = cut->segments, length = cut->length;
    if (start < stop && cut->opened > 0 && start < entry(documents, FIRST_TOKEN, cut->opened - 1)) {
        return 0;
    }
    if (!put_range(cut, start, stop)) {
        return 0;
    }
    while (start < stop && cut->opened < documents->columns) {
        int64_t first = entry(documents, FIRST_TOKEN, cut->opened);
        if (first >= stop) {
            break;
        }
        /* The last source segment appended is the last one of the result, so count back from it in both. */
        int64_t behind = minus(plus(cut->near, 1), entry(documents, FIRST_SEGMENT, cut->opened));
        open_document(cut, first > start ? minus(cut->segments, behind) : segments,
                      first > start ? minus(cut->length, stop - first) : length, cut->opened);
    }
    return 1;
}

/* Append tokens from `start`, counted within a document; past its end, append text at its next position. */
static int put_window(Cut *cut, int64_t d, int64_t start, int64_t tokens) {
    if (d < 0 || d >= cut->documents.columns || start < 0 || tokens < 0 || tokens > INT32_MAX) {
        return 0;
    }
    int64_t first = entry(&cut->documents, FIRST_TOKEN, d), known = length_of_document(cut, d);
    int64_t next = entry(&cut->documents, NEXT_POSITION, d), left = start < known ? known - start : 0;
    int64_t inside = tokens < left ? tokens : left, rest = tokens - inside, begin = plus(first, start);
    open_document(cut, cut->segments, cut->length, d);
    if (inside > 0 && !put_range(cut, begin, plus(begin, inside))) {
        return 0;
    }
    if (rest == 0) {
        return 1;
    }
    int64_t id = plus(next, start < known ? 0 : minus(start, known)); /* far below int32 without a next position */
    if (id < INT32_MIN || id > INT32_MAX || id + rest - 1 > INT32_MAX) {
        return 0;
    }
    if (cut->header.data != NULL && cut->opened <= cut->header.columns) {
        put_entry(&cut->header, NEXT_POSITION, cut->opened - 1, id + rest);
    }
    return put_run(cut, rest, id, 1);
}

static int put_padded(Cut *cut, int64_t d, int64_t length, int on_the_left) {
    int64_t first = entry(&cut->documents, FIRST_TOKEN, d), known = length_of_document(cut, d);
    if (known < 0 || length < known || length > INT32_MAX) {
        return 0;
    }
    open_document(cut, cut->segments, cut->length, d);
    return put_run(cut, on_the_left ? length - known : 0, 0, 0) && put_range(cut, first, plus(first, known)) &&
           put_run(cut, on_the_left ? 0 : length - known, 0, 0);
}

/* Append a rank's one or two blocks of each document, or of all documents as one sequence. */
static int put_shard(Cut *cut, int64_t rank, int64_t world_size, int64_t layout) {
    int64_t blocks = layout & LAYOUT_CONTIGUOUS || world_size == 1 ? 1 : 2, whole = layout & LAYOUT_SEQUENCE;
    if (world_size < 1 || world_size > INT32_MAX || rank < 0 || rank >= world_size) {
        return 0;
    }
    for (int64_t d = 0; d < (whole ? 1 : cut->documents.columns); d++) {
        int64_t first = whole ? 0 : entry(&cut->documents, FIRST_TOKEN, d);
        int64_t tokens = whole ? cut->tokens : length_of_document(cut, d), block = tokens / (world_size * blocks);
        if (tokens < 0 || tokens % (world_size * blocks) != 0) {
            return 0;
        }
        for (int64_t i = 0; i < blocks; i++) {
            int64_t start = plus(first, block * (i == 0 ? rank : 2 * world_size - 1 - rank));
            if (!put_across(cut, start, plus(start, block))) {
                return 0;
            }
        }
    }
    return 1;
}

static int64_t number(const Numbers *numbers, int64_t i) {
    return item(&numbers->vector, numbers->vector.size < 0 ? 0 : i);
}

/* Append everything, or only count it while the result has no data. */
static int put_all(Cut *cut, int64_t rule, int64_t count, const Numbers *asked) {
    int fits = 1;
    cut->segments = cut->length = cut->opened = cut->near = 0;
    if (rule == SHARD) {
        fits = put_shard(cut, number(&asked[0], 0), number(&asked[1], 0), number(&asked[2], 0));
    }
    for (int64_t i = 0; fits && rule != SHARD && i < count; i++) {
        if (rule == TAKE) {
            fits = put_across(cut, number(&asked[0], i), number(&asked[1], i));
        } else if (rule == WINDOW) {
            fits = number(&asked[1], i) <= INT32_MAX &&
                   put_window(cut, number(&asked[0], i), number(&asked[1], i), number(&asked[2], i));
        } else if (rule == DECODE) {
            fits = put_window(cut, i, length_of_document(cut, i), number(&asked[0], i));
        } else {
            fits = put_padded(cut, i, number(&asked[0], i), number(&asked[1], i) != 0);
        }
    }
    while (fits && (rule == TAKE || rule == SHARD) && cut->opened < cut->documents.columns) {
        open_document(cut, cut->segments, cut->length, cut->opened);
    }
    return fits;
}

static int read_int(PyObject *object, int64_t *value) {
    if (object == NULL || !PyLong_CheckExact(object)) {
        PyErr_Clear();
        return 0;
    }
    *value = PyLong_AsLongLong(object);
    int fits = *value != -1 || !PyErr_Occurred();
    PyErr_Clear();
    return fits;
}

/* Read an int, a list of ints, an int64 vector or None; return 0 for anything else, with an exception only if memory
 * runs out. */
static int take_numbers(Buffers *buffers, PyObject *object, Numbers *numbers) {
    Py_ssize_t count = length_of(object);
    if (object == Py_None) {
        return 1;
    }
    if (count < 0 && !PyLong_CheckExact(object)) {
        return take_vector(buffers, object, 'q', 0, &numbers->vector);
    }
    numbers->vector.data = (char *)&numbers->one;
    if (count < 0) {
        return read_int(object, &numbers->one);
    }
    if (count > PTRDIFF_MAX / 8 || (numbers->room = PyBytes_FromStringAndSize(NULL, 8 * count)) == NULL) {
        return 0;
    }
    numbers->vector.data = PyBytes_AsString(numbers->room);
    numbers->vector.size = count;
    numbers->vector.stride = 8;
    int fits = 1;
    for (Py_ssize_t i = 0; fits && i < count; i++) {
        PyObject *each = PySequence_GetItem(object, i); /* owned, since another thread may change the list */
        int64_t value = 0;
        fits = read_int(each, &value);
        put(&numbers->vector, i, value);
        Py_XDECREF(each);
    }
    return fits;
}

/* Return whether each argument has the number of values that the rule requires. */
static int numbers_fit(int64_t rule, int64_t count, const Numbers *asked) {
    static const int wanted[] = {2, 3, 3, 1, 2}; /* arguments of each rule */
    int each = rule == TAKE || rule == WINDOW;   /* a single number for all is not allowed */
    int fits = rule >= TAKE && rule <= LENGTHEN && (count >= 0 || !each);
    for (int i = 0; fits && i < wanted[rule]; i++) {
        const Vector *vector = &asked[i].vector;
        fits = vector->data != NULL && (vector->size == count || (vector->size < 0 && !each));
        fits = fits && (vector->size >= 0 || within(asked[i].one, 0, INT32_MAX)); /* checked even without documents */
    }
    return fits;
}

/* Create the arrays of the counted result, still to be filled: (table, documents, tokens), or NULL. */
static PyObject *make_result(Cut *cut, int64_t documents) {
    int64_t segments = cut->segments, rows = cut->table.rows;
    if (segments > PTRDIFF_MAX / 8 / rows) {
        return NULL;
    }
    PyObject *table = PyByteArray_FromStringAndSize(NULL, 8 * rows * segments), *result = NULL;
    PyObject *header = PyByteArray_FromStringAndSize(NULL, 8 * 4 * documents);
    if (table != NULL && header != NULL) {
        cut->cut = (Matrix){PyByteArray_AsString(table), rows, segments, 8 * segments, 8, 8, 'q'};
        cut->header = (Matrix){PyByteArray_AsString(header), 4, documents, 8 * documents, 8, 8, 'q'};
        result = Py_BuildValue("(OOL)", table, header, (long long)cut->length);
    }
    Py_XDECREF(table);
    Py_XDECREF(header);
    return result;
}

/* Return the result if it was filled as counted; it was not if another thread wrote to the source. */
static PyObject *filled(const Cut *cut, int fits, PyObject *result) {
    if (fits && cut->segments == cut->cut.columns) {
        return result;
    }
    Py_DECREF(result);
    return NULL;
}

static PyObject *put_result(Cut *cut, int64_t rule, int64_t count, const Numbers *asked, int64_t documents) {
    PyObject *result = make_result(cut, documents);
    int fits;
    if (result == NULL) {
        return NULL;
    }
    if (cut->cut.rows * cut->cut.row_stride < RELEASE_GIL_BYTES) {
        fits = put_all(cut, rule, count, asked);
    } else {
        Py_BEGIN_ALLOW_THREADS
            fits = put_all(cut, rule, count, asked);
        Py_END_ALLOW_THREADS
    }
    return filled(cut, fits, result);
}

/* Return whether the arrays have the rows of a placed table. */
static int is_placed(const Matrix *table, const Matrix *documents) {
    return table->rows > AXES && is_block(table, AXES + (table->rows - AXES) / 4 * 4) && is_block(documents, 4);
}

/* cut(table, documents, tokens, rule, a, b, c) -> (bytearray of the table, bytearray of its documents, tokens), or
 * None.
 *
 * The first three arguments are those of a placed table. Pass None for those of a to c that a rule does not use:
 *
 *   TAKE      starts, stops of ranges of tokens
 *   SHARD     rank, world size, layout index
 *   WINDOW    documents, first tokens within them, lengths
 *   DECODE    tokens, per document or one number
 *   LENGTHEN  lengths, per document or one number, None for the longest; 1 for padding on the left */
PyObject *native_cut(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Buffers buffers;
    Cut cut;
    Numbers asked[3];
    int64_t rule = -1;
    PyObject *result = NULL;
    (void)self;
    if (!arguments("cut", 7, count)) {
        return NULL;
    }
    buffers.count = 0;
    memset(&cut, 0, sizeof cut);
    int fits = take_matrix(&buffers, args[0], 0, &cut.table) && take_matrix(&buffers, args[1], 0, &cut.documents) &&
               read_int(args[2], &cut.tokens) && read_int(args[3], &rule) && is_placed(&cut.table, &cut.documents);
    for (int i = 0; i < 3; i++) {
        asked[i] = (Numbers){{NULL, -1, 0}, 0, NULL};
        fits = fits && take_numbers(&buffers, args[4 + i], &asked[i]);
    }
    if (fits && rule == LENGTHEN && args[4] == Py_None) {
        asked[0].vector.data = (char *)&asked[0].one;
        for (int64_t d = 0; d < cut.documents.columns; d++) {
            int64_t length = length_of_document(&cut, d);
            asked[0].one = length > asked[0].one ? length : asked[0].one;
        }
    }
    if (fits) {
        int each = rule == TAKE || rule == WINDOW;
        int64_t documents = cut.documents.columns, parts = each ? asked[0].vector.size : rule == SHARD ? -1 : documents;
        if (numbers_fit(rule, parts, asked) && put_all(&cut, rule, parts, asked)) {
            result = put_result(&cut, rule, parts, asked, rule == WINDOW ? parts : documents);
        }
    }
    for (int i = 0; i < 3; i++) {
        Py_XDECREF(asked[i].room);
    }
    return answer(&buffers, result);
}

int take_placed(Buffers *buffers, PyObject *object, PyObject *const *names, Matrix *table, Matrix *documents,
                int64_t *tokens) {
    PyObject *read[3] = {NULL, NULL, NULL};
    int fits = object != NULL;
    for (int i = 0; fits && i < 3; i++) {
        read[i] = PyObject_GetAttr(object, names[i]);
        fits = read[i] != NULL;
    }
    fits = fits && take_matrix(buffers, read[0], 0, table) && take_matrix(buffers, read[1], 0, documents) &&
           read_int(read[2], tokens) && is_placed(table, documents) && table->rows <= AXES + 4 * MAX_AXES &&
           within(table->columns, 0, *tokens);
    for (int i = 0; i < 3; i++) {
        Py_XDECREF(read[i]); /* the buffers hold references */
    }
    PyErr_Clear();
    return fits;
}

/* A table from which documents are read. */
typedef struct {
    Buffers buffers;
    Matrix table, documents;
    int64_t tokens;
} Source;

/* Append documents first to stop of a table. */
static int put_documents(Cut *cut, const Source *source, int64_t first, int64_t stop) {
    const Matrix *documents = &source->documents;
    int64_t begin = first < documents->columns ? entry(documents, FIRST_TOKEN, first) : source->tokens;
    int64_t end = stop < documents->columns ? entry(documents, FIRST_TOKEN, stop) : source->tokens;
    int64_t segments = cut->segments, length = cut->length;
    cut->table = source->table;
    cut->documents = source->documents;
    cut->tokens = source->tokens;
    cut->near = 0;
    if (!put_range(cut, begin, end) || cut->segments > PTRDIFF_MAX / 8 / cut->table.rows || cut->length < length) {
        return 0;
    }
    for (int64_t d = first; d < stop; d++) {
        int64_t before = minus(entry(documents, FIRST_SEGMENT, d), entry(documents, FIRST_SEGMENT, first));
        open_document(cut, plus(segments, before), plus(length, minus(entry(documents, FIRST_TOKEN, d), begin)), d);
    }
    return 1;
}

/* Append the documents of all tables, or only count them while the result has no data. A changed document of the first
 * table is left out (-1) or replaced by the table with this index. */
static int put_tables(Cut *cut, const Source *sources, int64_t count, const int64_t *changes, int64_t replaced) {
    int64_t known = sources[0].documents.columns, first = 0;
    int fits = 1;
    cut->segments = cut->length = cut->opened = 0;
    for (int64_t d = 0; fits && d < known; d++) {
        if (changes[d] != 0) {
            fits = put_documents(cut, &sources[0], first, d) &&
                   (changes[d] < 0 || put_documents(cut, &sources[changes[d]], 0, 1));
            first = d + 1;
        }
    }
    fits = fits && put_documents(cut, &sources[0], first, known);
    for (int64_t i = replaced + 1; fits && i < count; i++) {
        fits = put_documents(cut, &sources[i], 0, sources[i].documents.columns);
    }
    return fits;
}

/* Note that documents of the first table are removed, or replaced by the tables after it; return 0 if one of them does
 * not exist or changes twice, or if a table has other than one document. */
static int take_changes(const Source *sources, int64_t count, const Vector *removed, const Vector *replaced,
                        int64_t *changes) {
    int fits = removed->size >= 0 && within(replaced->size, 0, count - 1);
    for (int64_t i = 0; fits && i < removed->size + replaced->size; i++) {
        int64_t index = i - removed->size + 1, d = index > 0 ? item(replaced, index - 1) : item(removed, i);
        fits = within(d, 0, sources[0].documents.columns - 1) && changes[d] == 0 &&
               (index <= 0 || sources[index].documents.columns == 1);
        if (fits) {
            changes[d] = index > 0 ? index : -1;
        }
    }
    return fits;
}

/* concatenate(tables, class, names, removed, replaced) -> (bytearray of the table, bytearray of its documents, tokens),
 * or None.
 *
 * tables: list of placed tables of this class; names: attributes of a table's arrays and number of tokens; removed and
 * replaced: documents of the first table to leave out, and to replace by the tables that follow it, in this order. */
PyObject *native_concatenate(PyObject *self, PyObject *const *args, Py_ssize_t argument_count) {
    Buffers buffers;
    Cut cut;
    Numbers asked[2] = {{{NULL, -1, 0}, 0, NULL}, {{NULL, -1, 0}, 0, NULL}};
    PyObject *result = NULL, *names[3];
    int64_t taken = 0, *changes = NULL;
    (void)self;
    if (!arguments("concatenate", 5, argument_count)) {
        return NULL;
    }
    buffers.count = 0;
    memset(&cut, 0, sizeof cut);
    int64_t count = length_of(args[0]);
    int fits = within(count, 1, INT32_MAX) && PyTuple_Check(args[2]) && PyTuple_Size(args[2]) == 3 &&
               take_numbers(&buffers, args[3], &asked[0]) && take_numbers(&buffers, args[4], &asked[1]);
    for (int i = 0; fits && i < 3; i++) {
        names[i] = PyTuple_GetItem(args[2], i);
    }
    Source *sources = fits ? malloc((size_t)count * sizeof *sources) : NULL;
    for (fits = sources != NULL; fits && taken < count; taken++) {
        PyObject *table = PySequence_GetItem(args[0], taken);
        Source *each = &sources[taken];
        each->buffers.count = 0;
        fits = table != NULL && (PyObject *)Py_TYPE(table) == args[1] &&
               take_placed(&each->buffers, table, names, &each->table, &each->documents, &each->tokens) &&
               each->table.rows == sources[0].table.rows;
        Py_XDECREF(table);
    }
    if (fits) {
        changes = calloc((size_t)sources[0].documents.columns + 1, sizeof *changes);
    }
    if (changes != NULL && take_changes(sources, count, &asked[0].vector, &asked[1].vector, changes) &&
        put_tables(&cut, sources, count, changes, asked[1].vector.size) &&
        (result = make_result(&cut, cut.opened)) != NULL) {
        result = filled(&cut, put_tables(&cut, sources, count, changes, asked[1].vector.size), result);
    }
    for (int64_t i = 0; i < taken; i++) {
        release(&sources[i].buffers);
    }
    free(sources);
    free(changes);
    Py_XDECREF(asked[0].room);
    Py_XDECREF(asked[1].room);
    return answer(&buffers, result);
}
