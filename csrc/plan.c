/* Place a batch of texts and grids in one pass according to its scheme's plan, which has an entry for every grid shape.
 * Schemes define positions in Python; this file only looks up their numbers, sums them and writes them. */

#include <math.h>

#include "plan.h"

/* Columns of a plan. Its first row is for texts, the others are slots for shapes. A slot without frames is empty; a
 * slot without a denominator has a shape that is not affine. */
enum {
    FRAMES,
    ROWS,
    COLUMNS,
    SEPARATOR,
    CONSUMED,
    DEMANDED, /* ids from the cursor to the lowest next position, or INT64_MIN */
    CLEARED,  /* ids that a grid keeps free before the text of its document; for texts ANY_CLEARS and ANY_COUNTS */
    OVER,     /* denominator */
    PLAN_AXES
};
enum { AT_ZERO, PER_CURSOR, PER_START, PER_NUMBER, PER_TEXT, PER_FRAME, PER_ROW, PER_COLUMN, PLAN_AXIS }; /* per axis */
enum { TEXTS, SLOTS };                                                                                    /* rows */
enum { ANY_CLEARS = 1, ANY_COUNTS = 2 }; /* whether any grid keeps ids free, and whether any counts the text */

/* What ids depend on: the cursor, the document's first id, and the numbers of previous grids and of text tokens in the
 * document. */
typedef struct {
    int64_t cursor, start, number, text;
} Place;

/* Return the slot of a shape in a plan with 2**n slots, or the empty slot where it belongs. */
static int64_t slot_of(const Matrix *plan, const int64_t *shape) {
    uint64_t hash = 0;
    for (int i = 0; i < CONSUMED; i++) {
        hash = (hash ^ (uint64_t)shape[i]) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
    }
    int64_t last = plan->rows - SLOTS - 1;
    for (int64_t i = (int64_t)(hash & (uint64_t)last);; i = (i + 1) & last) {
        int64_t slot = SLOTS + i, frames = entry(plan, slot, FRAMES);
        if (frames == 0 ||
            (frames == shape[FRAMES] && entry(plan, slot, ROWS) == shape[ROWS] &&
             entry(plan, slot, COLUMNS) == shape[COLUMNS] && entry(plan, slot, SEPARATOR) == shape[SEPARATOR])) {
            return slot;
        }
    }
}

int64_t axes_of(const Matrix *plan) { return (plan->columns - PLAN_AXES) / PLAN_AXIS; }

int is_plan(const Matrix *plan, int64_t axes) {
    int64_t slots = plan->rows - SLOTS;
    return axes > 0 && plan->format == 'q' && slots > 0 && (slots & (slots - 1)) == 0 &&
           plan->columns == PLAN_AXES + PLAN_AXIS * axes;
}

/* Write the ids of a grid or a text of this shape; return 0 if they might be outside int32. */
static int put_segment(const Matrix *table, int64_t s, const Matrix *plan, int64_t row, const int64_t *shape,
                       const Place *place) {
    int64_t axes = (table->rows - AXES) / 4, denominator = entry(plan, row, OVER), steps = 0, origins = 0;
    int64_t width = shape[COLUMNS] + shape[SEPARATOR];
    double most = (double)denominator * INT32_MAX;
    if (denominator < 1 || denominator > INT32_MAX) {
        return 0;
    }
    put_entry(table, DENOMINATOR, s, denominator);
    put_entry(table, HEIGHT, s, shape[ROWS]);
    put_entry(table, WIDTH, s, width);
    for (int64_t axis = 0; axis < axes; axis++) {
        int64_t from = PLAN_AXES + PLAN_AXIS * axis, to = AXES + 4 * axis;
        int64_t zero = entry(plan, row, from + AT_ZERO), per_cursor = entry(plan, row, from + PER_CURSOR);
        int64_t per_start = entry(plan, row, from + PER_START), per_number = entry(plan, row, from + PER_NUMBER);
        int64_t per_text = entry(plan, row, from + PER_TEXT);
        if (fabs((double)zero) + fabs((double)per_cursor) * fabs((double)place->cursor) +
                fabs((double)per_start) * fabs((double)place->start) +
                fabs((double)per_number) * (double)place->number + fabs((double)per_text) * (double)place->text >
            MAX_NUMERATOR) {
            return 0;
        }
        int64_t origin = zero + per_cursor * place->cursor + per_start * place->start + per_number * place->number +
                         per_text * place->text;
        double reach = fabs((double)origin);
        put_entry(table, to + ORIGIN, s, origin);
        origins |= origin;
        for (int i = 0; i < 3; i++) {
            int64_t step = entry(plan, row, from + PER_FRAME + i);
            reach += fabs((double)step) * (double)(shape[i] - 1 + (i == 2 ? shape[SEPARATOR] : 0));
            put_entry(table, to + STEP_FRAME + i, s, step);
            steps |= step;
        }
        if (reach > most) {
            return 0;
        }
    }
    /* Only padding has origin 0 and steps 0, so other constant ids get a step that no token takes. */
    if (steps == 0 && row != TEXTS) {
        put_entry(table, HEIGHT, s, shape[FRAMES] * shape[ROWS]);
        put_entry(table, AXES + STEP_FRAME, s, 1);
    } else if (steps == 0 && origins == 0) {
        put_entry(table, WIDTH, s, 1);
        put_entry(table, AXES + STEP_COL, s, 1);
    }
    return 1;
}

/* Read the shape of a segment in a batch. */
static void read_shape(const Batch *batch, int64_t s, int64_t *shape) {
    for (int i = 0; i < 3; i++) {
        shape[i] = entry(&batch->extents, i, s);
    }
    shape[SEPARATOR] = batch->separated && batch->separator.data[s * batch->separator.stride] != 0;
}

static inline int64_t kind_of(const Batch *batch, int64_t s) {
    return (uint8_t)batch->kind.data[s * batch->kind.stride];
}

/* Return the number of ids that the grids among these segments keep free before the text of their document. */
static int64_t cleared(const Batch *batch, int64_t first, int64_t stop) {
    int64_t most = 0, shape[CONSUMED];
    for (int64_t s = first; s < stop; s++) {
        if (kind_of(batch, s) == GRID) {
            read_shape(batch, s, shape);
            int64_t slot = slot_of(&batch->plan, shape), ids = entry(&batch->plan, slot, CLEARED);
            most = ids > most ? ids : most;
        }
    }
    return most;
}

/* Count the text tokens of these segments, including audio; return any number above INT32_MAX if there are more than
 * INT32_MAX. */
static int64_t text_tokens(const Batch *batch, int64_t first, int64_t stop) {
    int64_t tokens = 0;
    for (int64_t s = first; s < stop && tokens <= INT32_MAX; s++) {
        int64_t what = kind_of(batch, s);
        if (what == TEXT || what == AUDIO) {
            tokens = plus(tokens, entry(&batch->extents, COLUMNS, s));
        }
    }
    return tokens;
}

/* Place a document whose first token has the id `start`; return 0 if Python must place it or report an error. */
static int put_document(Batch *batch, int64_t d, int64_t start) {
    int64_t first = item(&batch->offsets, d), stop = item(&batch->offsets, d + 1);
    int64_t real = 0, demanded = INT64_MIN, before = PAD, free = 0;
    Place place = {start, start, 0, 0};
    if (first < 0 || stop > batch->kind.size) {
        return 0;
    }
    int64_t asked = entry(&batch->plan, TEXTS, CLEARED);
    free = asked & ANY_CLEARS ? cleared(batch, first, stop) : 0;
    place.text = asked & ANY_COUNTS ? text_tokens(batch, first, stop) : 0;
    if (free > INT32_MAX || place.text > INT32_MAX) {
        return 0;
    }
    put_entry(&batch->documents, FIRST_SEGMENT, d, first);
    put_entry(&batch->documents, FIRST_TOKEN, d, batch->token);
    for (int64_t s = first; s < stop; s++) {
        int64_t what = kind_of(batch, s), shape[CONSUMED];
        read_shape(batch, s, shape);
        int64_t tokens = tokens_of(shape[FRAMES], shape[ROWS], shape[COLUMNS], shape[SEPARATOR]);
        put_entry(&batch->table, OFFSET, s, batch->token);
        put_entry(&batch->table, SKIP, s, 0);
        batch->token = plus(batch->token, tokens);
        if (tokens == 0) {
            return 0;
        }
        if (what == GRID) {
            if ((batch->strict && before == GRID) || (shape[FRAMES] > 1 && (!batch->frames || batch->timed)) ||
                (shape[SEPARATOR] && !batch->separators)) {
                return 0;
            }
            int64_t slot = slot_of(&batch->plan, shape);
            if (entry(&batch->plan, slot, FRAMES) == 0) {
                batch->unknown = s;
                return 0;
            }
            if (!put_segment(&batch->table, s, &batch->plan, slot, shape, &place)) {
                return 0;
            }
            int64_t lowest = entry(&batch->plan, slot, DEMANDED), consumed = entry(&batch->plan, slot, CONSUMED);
            if (lowest != INT64_MIN && plus(place.cursor, lowest) > demanded) {
                demanded = plus(place.cursor, lowest);
            }
            if (consumed < -(int64_t)INT32_MAX || consumed > INT32_MAX) {
                return 0;
            }
            place.cursor += consumed;
            place.number++;
            real += tokens;
        } else if (what == TEXT || (what == AUDIO && batch->audio)) {
            Place after = {place.cursor + free, start, 0, 0};
            if (!put_segment(&batch->table, s, &batch->plan, TEXTS, shape, &after)) {
                return 0;
            }
            place.cursor += tokens;
            real += tokens;
        } else if (what != PAD || !put_text(&batch->table, s, tokens, 0, 0)) {
            return 0;
        }
        before = what;
        if (place.cursor < INT32_MIN || place.cursor > (int64_t)INT32_MAX + 1) {
            return 0;
        }
    }
    if (!batch->resumable) {
        put_entry(&batch->documents, NEXT_POSITION, d, INT64_MIN);
        put_entry(&batch->documents, DELTA, d, INT64_MIN);
        return 1;
    }
    int64_t next = place.cursor > demanded ? place.cursor : demanded;
    put_entry(&batch->documents, NEXT_POSITION, d, next);
    put_entry(&batch->documents, DELTA, d, next - start - real);
    return next <= (int64_t)INT32_MAX + 1;
}

int place_batch(Batch *batch, const Vector *starts, int64_t start) {
    int fits = 1;
    batch->token = 0;
    batch->unknown = -1;
    for (int64_t d = 0; fits && d < batch->documents.columns; d++) {
        int64_t first = starts == NULL ? start : item(starts, d);
        fits = first >= INT32_MIN && first <= INT32_MAX && put_document(batch, d, first);
    }
    return fits;
}

/* Return a new bytearray for (rows, columns) int64, and its matrix; NULL with an exception set if memory runs out. */
static PyObject *new_block(int64_t rows, int64_t columns, Matrix *matrix) {
    PyObject *bytes = PyByteArray_FromStringAndSize(NULL, 8 * rows * columns);
    Matrix block = {bytes == NULL ? NULL : PyByteArray_AsString(bytes), rows, columns, 8 * columns, 8, 8, 'q'};
    *matrix = block;
    return bytes;
}

/* place(kind, extents, segment_offsets, row_separator, timed, start, plan, rules)
 * -> (table, documents, tokens), the arrays as bytearrays; or the first grid whose shape is not in the plan; or None.
 *
 * The arrays are (5 + 4·axes, segments) and (4, documents). start: integer or (documents,); rules: whether grids must
 * not touch, may have frames, and may have row separators, and whether documents have next positions and may contain
 * audio; timed: whether frames have times that ids may follow (then no plan is valid). Anything else is declined. */
PyObject *native_place(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Buffers buffers;
    Batch batch;
    Vector starts = {NULL, 0, 0};
    int64_t start = 0;
    (void)self;
    if (!arguments("place", 8, count)) {
        return NULL;
    }
    buffers.count = 0;
    batch.separated = args[3] != Py_None;
    batch.timed = args[4] == Py_True;
    batch.unknown = -1;
    int one = PyLong_CheckExact(args[5]);
    if (one) {
        start = PyLong_AsLongLong(args[5]);
        if (start == -1 && PyErr_Occurred()) { /* outside int64 */
            PyErr_Clear();
            return Py_NewRef(Py_None);
        }
    }
    if (!take_vector(&buffers, args[0], 'B', 0, &batch.kind) || !take_matrix(&buffers, args[1], 0, &batch.extents) ||
        !take_vector(&buffers, args[2], 'q', 0, &batch.offsets) ||
        (batch.separated && !take_vector(&buffers, args[3], '?', 0, &batch.separator)) ||
        (!one && !take_vector(&buffers, args[5], 'q', 0, &starts)) || !take_matrix(&buffers, args[6], 0, &batch.plan) ||
        !is_plan(&batch.plan, (batch.plan.columns - PLAN_AXES) / PLAN_AXIS) || !is_block(&batch.extents, 3) ||
        batch.extents.columns != batch.kind.size || batch.offsets.size < 1 ||
        (!one && starts.size != batch.offsets.size - 1) ||
        (batch.separated && batch.separator.size != batch.kind.size) || !PyTuple_Check(args[7]) ||
        PyTuple_Size(args[7]) != 5) {
        return answer(&buffers, NULL);
    }
    batch.strict = PyTuple_GetItem(args[7], 0) == Py_True;
    batch.frames = PyTuple_GetItem(args[7], 1) == Py_True;
    batch.separators = PyTuple_GetItem(args[7], 2) == Py_True;
    batch.resumable = PyTuple_GetItem(args[7], 3) == Py_True;
    batch.audio = PyTuple_GetItem(args[7], 4) == Py_True;
    int64_t axes = (batch.plan.columns - PLAN_AXES) / PLAN_AXIS;
    PyObject *table = new_block(AXES + 4 * axes, batch.kind.size, &batch.table), *result = NULL;
    PyObject *documents = new_block(4, batch.offsets.size - 1, &batch.documents);
    if (table != NULL && documents != NULL) {
        if (place_batch(&batch, one ? NULL : &starts, start)) {
            result = Py_BuildValue("(OOL)", table, documents, (long long)batch.token);
        } else if (batch.unknown >= 0) {
            result = PyLong_FromLongLong(batch.unknown);
        }
    }
    Py_XDECREF(table);
    Py_XDECREF(documents);
    return answer(&buffers, result);
}

/* enter(plan, rows) -> True or None: enter rows into a plan, which must have more empty slots than there are rows. */
PyObject *native_enter(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Buffers buffers;
    Matrix plan, rows;
    (void)self;
    if (!arguments("enter", 2, count)) {
        return NULL;
    }
    buffers.count = 0;
    if (!take_matrix(&buffers, args[0], PyBUF_WRITABLE, &plan) || !take_matrix(&buffers, args[1], 0, &rows) ||
        rows.format != 'q' || rows.columns != plan.columns || rows.rows >= plan.rows - SLOTS ||
        !is_plan(&plan, axes_of(&plan))) {
        return answer(&buffers, NULL);
    }
    for (int64_t i = 0; i < rows.rows; i++) {
        int64_t shape[CONSUMED];
        for (int j = 0; j < CONSUMED; j++) {
            shape[j] = entry(&rows, i, j);
        }
        int64_t slot = slot_of(&plan, shape);
        for (int64_t column = 0; column < plan.columns; column++) {
            put_entry(&plan, slot, column, entry(&rows, i, column));
        }
    }
    return answer(&buffers, Py_NewRef(Py_True));
}
