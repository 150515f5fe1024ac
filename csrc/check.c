/* Check the arrays of a placed table. mmpos/positions/table_rows.py makes the same checks and raises the errors. */

#include <math.h>

#include "table.h"

/* Return whether a segment that ends before token `end` is valid and its ids are certain to be within int32. */
static int segment_is_sound(const Matrix *table, int64_t s, int64_t end, int fractional) {
    int64_t length = end - entry(table, OFFSET, s), skip = entry(table, SKIP, s), height = entry(table, HEIGHT, s),
            width = entry(table, WIDTH, s), denominator = entry(table, DENOMINATOR, s);
    if (!within(length, 1, (int64_t)INT32_MAX + 1) || !within(skip, 0, INT32_MAX) || !within(height, 1, INT32_MAX) ||
        !within(width, 1, INT32_MAX) || !within(denominator, 1, fractional ? INT32_MAX : 1) ||
        skip + length - 1 > INT32_MAX) {
        return 0;
    }
    int64_t last = skip + length - 1, rows = last / width;
    double most[3] = {(double)(last / (height * width)), (double)(rows < height - 1 ? rows : height - 1),
                      (double)(width - 1)};
    for (int64_t row = AXES; row < table->rows; row += 4) {
        double reach = fabs((double)entry(table, row + ORIGIN, s));
        for (int i = 0; i < 3; i++) {
            reach += fabs((double)entry(table, row + STEP_FRAME + i, s)) * most[i];
        }
        if (reach > MAX_NUMERATOR || reach > (double)denominator * INT32_MAX) {
            return 0;
        }
    }
    return 1;
}

static int document_is_sound(const Matrix *table, const Matrix *documents, int64_t d, int64_t tokens) {
    int64_t first = entry(documents, FIRST_SEGMENT, d), before = d > 0 ? entry(documents, FIRST_SEGMENT, d - 1) : 0,
            next = entry(documents, NEXT_POSITION, d), delta = entry(documents, DELTA, d);
    if (first < before || (d == 0 && first != 0) || first > table->columns ||
        entry(documents, FIRST_TOKEN, d) != (first < table->columns ? entry(table, OFFSET, first) : tokens)) {
        return 0;
    }
    return next == INT64_MIN ? delta == INT64_MIN
                             : within(next, INT32_MIN, (int64_t)INT32_MAX + 1) && delta != INT64_MIN &&
                                   fabs((double)delta) <= MAX_NUMERATOR;
}

/* placed(table, documents, tokens, fractional) -> bool: True if these are certainly the arrays of a placed table. */
PyObject *native_placed(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Buffers buffers;
    Matrix table, documents;
    (void)self;
    if (!arguments("placed", 4, count)) {
        return NULL;
    }
    int64_t tokens = PyLong_AsLongLong(args[2]);
    if (tokens == -1 && PyErr_Occurred()) { /* outside int64 */
        PyErr_Clear();
    }
    buffers.count = 0;
    int sound = take_matrix(&buffers, args[0], 0, &table) && take_matrix(&buffers, args[1], 0, &documents) &&
                table.rows > AXES && is_block(&table, AXES + (table.rows - AXES) / 4 * 4) &&
                table.rows <= AXES + 4 * MAX_AXES && is_block(&documents, 4) && within(tokens, 0, INT64_MAX) &&
                (table.columns == 0 ? tokens == 0 : documents.columns > 0 && entry(&table, OFFSET, 0) == 0);
    for (int64_t s = 0; sound && s < table.columns; s++) {
        int64_t end = s + 1 < table.columns ? entry(&table, OFFSET, s + 1) : tokens;
        sound = within(end, 0, tokens) && segment_is_sound(&table, s, end, args[3] == Py_True);
    }
    for (int64_t d = 0; sound && d < documents.columns; d++) {
        sound = document_is_sound(&table, &documents, d, tokens);
    }
    release(&buffers);
    return PyBool_FromLong(sound);
}
