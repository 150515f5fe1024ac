/* Compute canonical forms of documents' ids, which the fingerprints hash; see mmpos/analysis/fingerprint.py. */

#include "table.h"

static uint32_t id_at(const Matrix *ids, int64_t axis, int64_t token) {
    uint32_t id; /* unsigned, so that steps wrap around */
    memcpy(&id, ids->data + axis * ids->row_stride + 4 * token, 4);
    return id;
}

static void put_uint32(char *form, int64_t i, uint32_t value) { memcpy(form + 4 * i, &value, 4); }

/* Starting at `token`, return the first token whose ids are not the previous token's plus `steps`, else `end`. */
static int64_t end_of_run(const Matrix *ids, int64_t last, int64_t token, int64_t end, const uint32_t *steps) {
    for (int64_t axis = 0; axis < ids->rows && token < end; axis++) {
        uint32_t id = id_at(ids, axis, last), step = steps[axis];
        int64_t next = token;
        while (next < end && id_at(ids, axis, next) == id + step) {
            id += step;
            next++;
        }
        end = next;
    }
    return end;
}

/* Find the runs of equal steps in the segments, skipping padding; return the number of runs, or -1 for a malformed
 * table. If `form` has room for exactly that number, the runs' token counts and their steps on each axis are written
 * there. */
static int64_t find_runs(const Matrix *table, const Matrix *ids, int64_t first, int64_t stop, char *form,
                         int64_t most) {
    int64_t runs = 0, tokens = 0, last = 0;
    uint32_t steps[MAX_IDS], length = 0;
    for (int64_t s = first; s < stop; s++) {
        int64_t token = entry(table, OFFSET, s),
                end = s + 1 < table->columns ? entry(table, OFFSET, s + 1) : ids->columns;
        if (token < 0 || end > ids->columns) {
            return -1;
        }
        for (end = is_padding(table, s) ? token : end; token < end; last = token - 1) {
            int64_t next = tokens > 1 ? end_of_run(ids, last, token, end, steps) : token;
            int64_t new = next == token; /* the first two tokens always begin runs; the first one's step is its id */
            for (int64_t axis = 0; new && axis < ids->rows; axis++) {
                steps[axis] = id_at(ids, axis, token) - (tokens > 0 ? id_at(ids, axis, last) : 0);
                if (runs < most) {
                    put_uint32(form, (1 + axis) * most + runs, steps[axis]);
                }
            }
            runs += new;
            length = new ? 1 : length + (uint32_t)(next - token);
            if (runs <= most) {
                put_uint32(form, runs - 1, length);
            }
            tokens += next - token + new;
            token = next + new;
        }
    }
    return runs;
}

/* Return the form of a document as bytes (the number of axes, 0 for integer ids, the runs), or NULL for a malformed
 * table. */
static PyObject *form_of(const Matrix *table, const Matrix *ids, int64_t first, int64_t stop) {
    int64_t runs = first < 0 || stop > table->columns ? -1 : find_runs(table, ids, first, stop, NULL, 0);
    PyObject *form = runs < 0 ? NULL : PyBytes_FromStringAndSize(NULL, 2 + 4 * (1 + ids->rows) * runs);
    if (form != NULL) {
        char *bytes = PyBytes_AsString(form);
        bytes[0] = (char)ids->rows;
        bytes[1] = 0;
        find_runs(table, ids, first, stop, bytes + 2, runs);
    }
    return form;
}

/* forms(table, documents, tokens) -> list of bytes, or None. The arrays are those of a placed table of int32 ids. */
PyObject *native_forms(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    static const uint8_t axes[MAX_IDS] = {0, 1, 2, 3, 4, 5, 6, 7};
    const uint16_t one = 1; /* its first byte is 0 on big-endian machines, which cannot use forms */
    Buffers buffers;
    Matrix table, documents, ids;
    PyObject *forms = NULL;
    (void)self;
    if (!arguments("forms", 3, count)) {
        return NULL;
    }
    buffers.count = 0;
    int64_t tokens = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred() || tokens < 0 || tokens > PTRDIFF_MAX / 4 / MAX_IDS || !*(const char *)&one ||
        !take_matrix(&buffers, args[0], 0, &table) || !take_matrix(&buffers, args[1], 0, &documents) ||
        !within((table.rows - AXES) / 4, 1, MAX_IDS) || !is_block(&table, AXES + (table.rows - AXES) / 4 * 4) ||
        !is_block(&documents, 4)) {
        return answer(&buffers, NULL);
    }
    int64_t rows = (table.rows - AXES) / 4;
    ids = (Matrix){PyMem_Malloc((size_t)(4 * rows * tokens)), rows, tokens, 4 * tokens, 4, 4, 'i'};
    if (ids.data == NULL) {
        PyErr_NoMemory();
    } else if (expand_ids(&table, tokens, &ids, axes, 1)) {
        forms = PyList_New(documents.columns);
        for (int64_t d = 0; forms != NULL && d < documents.columns; d++) {
            int64_t stop = d + 1 < documents.columns ? entry(&documents, FIRST_SEGMENT, d + 1) : table.columns;
            PyObject *form = form_of(&table, &ids, entry(&documents, FIRST_SEGMENT, d), stop);
            if (form == NULL || PyList_SetItem(forms, d, form) != 0) {
                Py_CLEAR(forms);
            }
        }
    }
    PyMem_Free(ids.data);
    return answer(&buffers, forms);
}
