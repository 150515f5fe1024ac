/* Which segments of a batch are texts and grids, where cursors stand before them, and the columns of the placed table.
 * Where a scheme puts things it says in Python; here its numbers are moved. */

#include <math.h>

#include "table.h"

enum { TEXT_CURSOR, GRID_CURSOR, CURSORS };

/* split(kind, extents, segment_offsets, row_separator, start, block) -> (texts, grids, touching, moving) or None.
 *
 * Fills block, (9, segments) int64: the document and the tokens of every segment; index and tokens of texts and audio;
 * index, frames, height, width of the grids, and the start of their documents. Touching says whether a grid follows
 * a grid, moving whether one has frames. The table was checked when it was made; start is (documents,). */
PyObject *native_split(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Buffers buffers;
    Vector kind, offsets, separator, start;
    Matrix extents, block;
    (void)self;
    if (!arguments("split", 6, count)) {
        return NULL;
    }
    buffers.count = 0;
    int separated = args[3] != Py_None;
    if (!take_vector(&buffers, args[0], 'B', 0, &kind) || !take_matrix(&buffers, args[1], 0, &extents) ||
        !take_vector(&buffers, args[2], 'q', 0, &offsets) || !take_vector(&buffers, args[4], 'q', 0, &start) ||
        (separated && !take_vector(&buffers, args[3], '?', 0, &separator)) ||
        !take_matrix(&buffers, args[5], PyBUF_WRITABLE, &block) || !is_block(&block, BLOCK_ROWS) ||
        !is_block(&extents, 3) || block.columns != kind.size || extents.columns != kind.size ||
        offsets.size != start.size + 1 || (separated && separator.size != kind.size)) {
        return answer(&buffers, NULL);
    }
    int64_t texts = 0, grids = 0;
    long touching = 0, moving = 0;
    for (int64_t d = 0; d < start.size; d++) {
        int64_t stop = item(&offsets, d + 1), before = PAD;
        for (int64_t s = item(&offsets, d); s < stop; s++) {
            if (s < 0 || s >= kind.size) {
                return answer(&buffers, NULL);
            }
            int64_t what = (uint8_t)kind.data[s * kind.stride];
            int64_t frames = entry(&extents, 0, s), height = entry(&extents, 1, s), width = entry(&extents, 2, s);
            int64_t extra = separated && separator.data[s * separator.stride] != 0;
            uint64_t length = (uint64_t)frames * (uint64_t)height * ((uint64_t)width + (uint64_t)extra);
            put_entry(&block, DOCUMENT, s, d);
            put_entry(&block, LENGTH, s, (int64_t)length);
            if (what > AUDIO) {
                return answer(&buffers, NULL);
            }
            if ((what == TEXT || what == AUDIO) && texts < kind.size) {
                put_entry(&block, TEXT_AT, texts, s);
                put_entry(&block, TEXT_LENGTH, texts++, width);
            } else if (what == GRID && grids < kind.size) {
                put_entry(&block, GRID_AT, grids, s);
                put_entry(&block, GRID_FRAMES, grids, frames);
                put_entry(&block, GRID_HEIGHT, grids, height);
                put_entry(&block, GRID_WIDTH, grids, width);
                put_entry(&block, GRID_START, grids++, item(&start, d));
                touching |= before == GRID;
                moving |= frames > 1;
            }
            before = what;
        }
    }
    return answer(&buffers, Py_BuildValue("nnNN", (Py_ssize_t)texts, (Py_ssize_t)grids, PyBool_FromLong(touching),
                                          PyBool_FromLong(moving)));
}

static int64_t bounded(int64_t cursor) {
    return cursor > (int64_t)INT32_MAX + 1   ? (int64_t)INT32_MAX + 1
           : cursor < (int64_t)INT32_MIN - 1 ? (int64_t)INT32_MIN - 1
                                             : cursor;
}

/* cursors(kind, segment_offsets, start, advance_text, advance_grids, cursors, end) -> True or None.
 *
 * Fills cursors, (2, segments) int64: the cursor before each of the texts and of the grids, within a little more than
 * int32; and end, (documents,), the cursor after each document. */
PyObject *native_cursors(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Buffers buffers;
    Vector kind, offsets, start, of_text, of_grids, end;
    Matrix cursors;
    (void)self;
    if (!arguments("cursors", 7, count)) {
        return NULL;
    }
    buffers.count = 0;
    if (!take_vector(&buffers, args[0], 'B', 0, &kind) || !take_vector(&buffers, args[1], 'q', 0, &offsets) ||
        !take_vector(&buffers, args[2], 'q', 0, &start) || !take_vector(&buffers, args[3], 'q', 0, &of_text) ||
        !take_vector(&buffers, args[4], 'q', 0, &of_grids) ||
        !take_matrix(&buffers, args[5], PyBUF_WRITABLE, &cursors) ||
        !take_vector(&buffers, args[6], 'q', PyBUF_WRITABLE, &end) || !is_block(&cursors, CURSORS) ||
        cursors.columns != kind.size || of_text.size > kind.size || of_grids.size > kind.size ||
        offsets.size != start.size + 1 || end.size != start.size) {
        return answer(&buffers, NULL);
    }
    int64_t texts = 0, grids = 0;
    for (int64_t d = 0; d < start.size; d++) {
        int64_t cursor = item(&start, d), stop = item(&offsets, d + 1);
        for (int64_t s = item(&offsets, d); s < stop; s++) {
            if (s < 0 || s >= kind.size) {
                return answer(&buffers, NULL);
            }
            int64_t what = (uint8_t)kind.data[s * kind.stride], here = bounded(cursor);
            if (what == TEXT || what == AUDIO) {
                if (texts >= of_text.size) {
                    return answer(&buffers, NULL);
                }
                put_entry(&cursors, TEXT_CURSOR, texts, here);
                cursor = plus(cursor, item(&of_text, texts++));
            } else if (what != PAD) {
                if (grids >= of_grids.size) {
                    return answer(&buffers, NULL);
                }
                put_entry(&cursors, GRID_CURSOR, grids, here);
                cursor = plus(cursor, item(&of_grids, grids++));
            }
        }
        put(&end, d, cursor);
    }
    return answer(&buffers, texts == of_text.size && grids == of_grids.size ? Py_NewRef(Py_True) : NULL);
}

/* Write a number for all, or one for each, into a row of the columns listed in a row of block. */
static int scatter(const Matrix *table, int64_t row, const Matrix *block, int64_t list, int64_t size,
                   PyObject *values) {
    Buffers buffers;
    Vector each = {NULL, 0, 0};
    int64_t all = 0;
    buffers.count = 0;
    int one = PyLong_CheckExact(values);
    int fits = one;
    if (one) {
        all = PyLong_AsLongLong(values);
        if (all == -1 && PyErr_Occurred()) { /* beyond int64 */
            PyErr_Clear();
            return 0;
        }
    } else {
        fits = take_vector(&buffers, values, 'q', 0, &each) && each.size == size;
    }
    for (int64_t i = 0; fits && i < size; i++) {
        int64_t column = entry(block, list, i);
        fits = column >= 0 && column < table->columns;
        if (fits) {
            put_entry(table, row, column, one ? all : item(&each, i));
        }
    }
    release(&buffers);
    return fits;
}

/* Write a placement, (denominator, origin, step_frame, step_row, step_col), of the texts or the grids. */
static int put_placement(const Matrix *table, const Matrix *block, int64_t list, int64_t size, PyObject *placement) {
    int64_t axes = (table->rows - AXES) / 4;
    if (!PyTuple_Check(placement) || PyTuple_Size(placement) != 5 ||
        !scatter(table, DENOMINATOR, block, list, size, PyTuple_GetItem(placement, 0))) {
        return 0;
    }
    for (int64_t i = 0; i < 4; i++) {
        PyObject *per_axis = PyTuple_GetItem(placement, i + 1);
        if (per_axis == Py_None) {
            continue;
        }
        if (length_of(per_axis) != axes) {
            return 0;
        }
        for (int64_t axis = 0; axis < axes; axis++) {
            PyObject *values = PySequence_GetItem(per_axis, axis);
            int fits = values != NULL && scatter(table, AXES + 4 * axis + i, block, list, size, values);
            Py_XDECREF(values);
            if (!fits) {
                PyErr_Clear();
                return 0;
            }
        }
    }
    return 1;
}

/* Whether a column has a denominator, ids surely within int32, and something that is not 0 unless it is padding. */
static int within(const Matrix *table, int64_t s, int64_t frames, int padding) {
    double denominator = (double)entry(table, DENOMINATOR, s), size[4];
    int64_t axes = (table->rows - AXES) / 4;
    int64_t any = 0;
    size[0] = 1;
    size[1] = (double)frames - 1;
    size[2] = (double)entry(table, HEIGHT, s) - 1;
    size[3] = (double)entry(table, WIDTH, s) - 1;
    if (denominator < 1 || denominator > INT32_MAX) {
        return 0;
    }
    for (int64_t axis = 0; axis < axes; axis++) {
        double reach = 0;
        for (int64_t i = 0; i < 4; i++) {
            int64_t step = entry(table, AXES + 4 * axis + i, s);
            reach += fabs((double)step) * size[i];
            any |= step;
        }
        if (reach > denominator * INT32_MAX) {
            return 0;
        }
    }
    return padding || any != 0;
}

/* Everything but what placements say: offsets, extents, and zeros to begin with. */
static void put_shapes(const Matrix *table, const Matrix *block, int64_t grids) {
    int64_t token = 0;
    for (int64_t row = SKIP; row < table->rows; row++) {
        for (int64_t s = 0; s < table->columns; s++) {
            put_entry(table, row, s, row == HEIGHT || row == DENOMINATOR);
        }
    }
    for (int64_t s = 0; s < table->columns; s++) {
        put_entry(table, OFFSET, s, token);
        put_entry(table, WIDTH, s, entry(block, LENGTH, s));
        token = plus(token, entry(block, LENGTH, s));
    }
    for (int64_t g = 0; g < grids; g++) {
        int64_t s = entry(block, GRID_AT, g), height = entry(block, GRID_HEIGHT, g),
                width = entry(block, GRID_WIDTH, g);
        if (s >= 0 && s < table->columns) {
            uint64_t plain = (uint64_t)entry(block, GRID_FRAMES, g) * (uint64_t)height * (uint64_t)width;
            put_entry(table, HEIGHT, s, height);
            put_entry(table, WIDTH, s, plus(width, plain != (uint64_t)entry(block, LENGTH, s))); /* a separator */
        }
    }
}

static void put_documents(const Matrix *documents, const Matrix *table, const Matrix *block, const Vector *kind,
                          const Vector *offsets, const Vector *start, const Vector *end) {
    for (int64_t d = 0; d < start->size; d++) {
        int64_t first = item(offsets, d), stop = item(offsets, d + 1), real = 0;
        for (int64_t s = first; s < stop && s >= 0 && s < kind->size; s++) {
            real = plus(real, (uint8_t)kind->data[s * kind->stride] == PAD ? 0 : entry(block, LENGTH, s));
        }
        put_entry(documents, FIRST_SEGMENT, d, first);
        put_entry(documents, FIRST_TOKEN, d, first >= 0 && first < kind->size ? entry(table, OFFSET, first) : 0);
        put_entry(documents, NEXT_POSITION, d, end == NULL ? INT64_MIN : item(end, d));
        put_entry(documents, DELTA, d, end == NULL ? INT64_MIN : minus(minus(item(end, d), item(start, d)), real));
    }
}

/* Whether every next position is an id, or right after the last one. */
static int ends_within(const Vector *end) {
    for (int64_t d = 0; d < end->size; d++) {
        int64_t next = item(end, d);
        if (next < INT32_MIN || next > (int64_t)INT32_MAX + 1) {
            return 0;
        }
    }
    return 1;
}

/* columns(kind, segment_offsets, start, end, block, texts, grids, of_text, of_grids, table, documents)
 * -> tokens, or None.
 *
 * Fills table, (5 + 4·axes, segments), and documents, (4, documents), from what split found and from the placements
 * of texts and grids, (denominator, origin, step_frame, step_row, step_col) as a scheme gives them; end may be None
 * where there is no next position. It declines if an id might be outside int32, or a next position is. */
PyObject *native_columns(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Buffers buffers;
    Vector kind, offsets, start, end;
    Matrix block, table, documents;
    (void)self;
    if (!arguments("columns", 11, count)) {
        return NULL;
    }
    int64_t texts = PyLong_AsLongLong(args[5]), grids = PyLong_AsLongLong(args[6]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    buffers.count = 0;
    int resumable = args[3] != Py_None;
    if (!take_vector(&buffers, args[0], 'B', 0, &kind) || !take_vector(&buffers, args[1], 'q', 0, &offsets) ||
        !take_vector(&buffers, args[2], 'q', 0, &start) ||
        (resumable && !take_vector(&buffers, args[3], 'q', 0, &end)) || !take_matrix(&buffers, args[4], 0, &block) ||
        !take_matrix(&buffers, args[9], PyBUF_WRITABLE, &table) ||
        !take_matrix(&buffers, args[10], PyBUF_WRITABLE, &documents) || !is_block(&block, BLOCK_ROWS) ||
        !is_block(&table, AXES + (table.rows - AXES) / 4 * 4) || table.rows <= AXES || !is_block(&documents, 4) ||
        block.columns != kind.size || table.columns != kind.size || documents.columns != start.size ||
        offsets.size != start.size + 1 || (resumable && end.size != start.size) || texts < 0 || texts > kind.size ||
        grids < 0 || grids > kind.size) {
        return answer(&buffers, NULL);
    }
    put_shapes(&table, &block, grids);
    int fits = (texts == 0 || put_placement(&table, &block, TEXT_AT, texts, args[7])) &&
               (grids == 0 || put_placement(&table, &block, GRID_AT, grids, args[8]));
    int64_t tokens = 0, grid = 0;
    fits = fits && (!resumable || ends_within(&end));
    for (int64_t s = 0; fits && s < kind.size; s++) {
        int64_t what = (uint8_t)kind.data[s * kind.stride], frames = 1;
        if (what == GRID) {
            fits = grid < grids;
            frames = fits ? entry(&block, GRID_FRAMES, grid++) : 1;
        }
        fits = fits && within(&table, s, frames, what == PAD);
        tokens = plus(tokens, entry(&block, LENGTH, s));
    }
    if (fits) {
        put_documents(&documents, &table, &block, &kind, &offsets, &start, resumable ? &end : NULL);
    }
    return answer(&buffers, fits ? PyLong_FromLongLong(tokens) : NULL);
}
