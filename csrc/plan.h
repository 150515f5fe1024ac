/* A batch of texts and grids, and its placement by a plan. */

#ifndef MMPOS_PLAN_H
#define MMPOS_PLAN_H

#include "table.h"

/* What a batch is made of, and where its cursor stands. */
typedef struct {
    Vector kind, offsets, separator;
    Matrix extents, plan, table, documents;
    int separated, strict, frames, separators, timed, resumable, audio;
    int64_t token, unknown; /* the first grid of a shape that the plan does not have, or -1 */
} Batch;

/* Axes of the scheme of a plan, if it is one. */
int64_t axes_of(const Matrix *plan);

/* Return whether these are the slots of a plan for a scheme with this number of axes. */
int is_plan(const Matrix *plan, int64_t axes);

/* Fill table and documents, whose sizes fit those of the others; each document starts at an id of its own, or all at
 * `start`. 0 where the way in Python must place the batch, or say what is wrong. */
int place_batch(Batch *batch, const Vector *starts, int64_t start);

#endif
