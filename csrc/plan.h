/* A batch of texts and grids, and its placement by a plan. */

#ifndef MMPOS_PLAN_H
#define MMPOS_PLAN_H

#include "table.h"

/* The segments of a batch, and the state of placing them. */
typedef struct {
    Vector kind, offsets, separator;
    Matrix extents, plan, table, documents;
    int separated, strict, frames, separators, timed, resumable, audio;
    int64_t token, unknown; /* unknown: first grid whose shape is not in the plan, or -1 */
} Batch;

/* Return the number of axes of the plan's scheme, if the matrix is a plan. */
int64_t axes_of(const Matrix *plan);

/* Return whether the matrix is a plan for a scheme with this number of axes. */
int is_plan(const Matrix *plan, int64_t axes);

/* Fill `table` and `documents`, whose sizes match the batch. Each document starts at its own id, or all start at
 * `start`. Return 0 if Python must place the batch or report an error. */
int place_batch(Batch *batch, const Vector *starts, int64_t start);

#endif
