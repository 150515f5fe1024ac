/* Rows of the arrays that C and Python both know; a test compares them with mmpos/positions/table_rows.py. */

#ifndef MMPOS_TABLE_H
#define MMPOS_TABLE_H

#include "native.h"

enum { OFFSET, SKIP, HEIGHT, WIDTH, DENOMINATOR, AXES };   /* of a placed table */
enum { ORIGIN, STEP_FRAME, STEP_ROW, STEP_COL };           /* of every axis of it, from AXES on */
enum { FIRST_SEGMENT, FIRST_TOKEN, NEXT_POSITION, DELTA }; /* of its documents */

#define MAX_AXES 16
#define MAX_IDS 8                           /* axes of a table whose ids are written */
#define MAX_NUMERATOR 4611686018427387904.0 /* 2**62 */

static inline int is_block(const Matrix *matrix, int64_t rows) { return matrix->format == 'q' && matrix->rows == rows; }

/* Fill out, (rows, num_tokens) of int32, int64 or float64 at any address, with the ids of these axes, which the table
 * has; 0 if it is none. */
int expand_ids(const Matrix *table, int64_t num_tokens, const Matrix *out, const uint8_t *axes, int wide);

#endif
