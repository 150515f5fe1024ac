/* Whether arrays are a segment table; which of its segments are texts and grids; and where cursors stand before them. */

#include "table.h"

enum { TEXT_CURSOR, GRID_CURSOR, CURSORS };

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

/* sound(kind, extents, segment_offsets, row_separator) -> bool, whether these are the arrays of a segment table without
 * clips, thumbnails and tiles. */
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
