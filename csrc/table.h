/* Row numbers in the arrays of tables; a test compares them with mmpos/positions/table_rows.py. */

#ifndef MMPOS_TABLE_H
#define MMPOS_TABLE_H

#include <math.h>

#include "native.h"

enum { OFFSET, SKIP, HEIGHT, WIDTH, DENOMINATOR, AXES };   /* rows of a placed table */
enum { ORIGIN, STEP_FRAME, STEP_ROW, STEP_COL };           /* rows per axis, from row AXES on */
enum { FIRST_SEGMENT, FIRST_TOKEN, NEXT_POSITION, DELTA }; /* rows of its documents */
enum { TAKE, SHARD, WINDOW, DECODE, LENGTHEN };            /* rules of cut */

#define MAX_AXES 16
#define MAX_IDS 8                           /* largest number of axes for which ids are written */
#define MAX_NUMERATOR 4611686018427387904.0 /* 2**62 */

static inline int within(int64_t value, int64_t least, int64_t most) { return value >= least && value <= most; }

static inline int64_t is_padding(const Matrix *table, int64_t s) {
    int64_t any = 0;
    for (int64_t row = AXES; row < table->rows; row++) {
        any |= entry(table, row, s);
    }
    return any == 0;
}

static inline int is_block(const Matrix *matrix, int64_t rows) { return matrix->format == 'q' && matrix->rows == rows; }

/* Read a table's two arrays and its number of tokens from three attributes; return 0 if one is not as expected, or if
 * there are more segments than tokens. */
int take_placed(Buffers *buffers, PyObject *object, PyObject *const *names, Matrix *table, Matrix *documents,
                int64_t *tokens);

/* Fill out, (rows, num_tokens) of int32, int64 or float64 at any alignment, with the table's ids on these axes; return
 * 0 if the table is malformed. */
int expand_ids(const Matrix *table, int64_t num_tokens, const Matrix *out, const uint8_t *axes, int wide);

/* Write a segment, except its offset and skip: either text that begins at an id, or padding, for which id and step are
 * 0. Return 0 if the ids exceed int32. */
static inline int put_text(const Matrix *table, int64_t s, int64_t tokens, int64_t cursor, int64_t step) {
    put_entry(table, DENOMINATOR, s, 1);
    put_entry(table, HEIGHT, s, 1);
    put_entry(table, WIDTH, s, tokens);
    for (int64_t row = AXES; row < table->rows; row += 4) {
        put_entry(table, row + ORIGIN, s, step ? cursor : 0);
        put_entry(table, row + STEP_FRAME, s, 0);
        put_entry(table, row + STEP_ROW, s, 0);
        put_entry(table, row + STEP_COL, s, step);
    }
    return fabs((double)cursor) + (double)tokens - 1 <= INT32_MAX;
}

#endif
