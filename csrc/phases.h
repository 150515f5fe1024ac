/* cos and sin of the pairs of tokens, the meaning of which is in mmpos/rotary/reference.py. */

#ifndef MMPOS_PHASES_H
#define MMPOS_PHASES_H

#include "native.h"

#define MOST_AXES 8

/* Where cos and sin come from: positions and frequencies, or tables that were made elsewhere. */
typedef struct {
    int given, fixed;
    Matrix cos, sin;              /* (tokens, pairs) float32, if given */
    Matrix ids, words, pair_axis; /* otherwise */
    float sin_of[4], cos_of[4], factor;
    int64_t tokens, pairs;
} Source;

/* Take the tuple that rotate describes; 0 if it is anything else. */
int take_source(Buffers *buffers, PyObject *tuple, Source *source);

#define BLOCK_PAIRS 1024 /* pairs whose phases are made at a time, or those of one token */

/* Phases in an order of pairs that suits who reads them. */
typedef struct {
    const Source *source;
    int wide;         /* whether to use wide vectors */
    int64_t block;    /* tokens at a time */
    int64_t *order;   /* (pairs,) which pair stands where; the caller fills it */
    uint64_t *tau;    /* (pairs,) turns per id, in units of 2**-64 */
    float *cos, *sin; /* (block, pairs) */
    uint32_t *turn;   /* (block, pairs) */
    uint32_t *rounds; /* (pairs,) whole turns per id */
    int32_t *axis;    /* (pairs,) counted from 1; 0 for a pair that does not turn */
} Phases;

/* Make room for a block, which the caller frees at `order`; 0 without memory. */
int phases_make(Phases *phases, const Source *source, int wide);

/* Read the frequencies in the order; 0 if a pair has an axis that is none. */
int phases_read(Phases *phases);

/* Fill cos and sin, times the factor, of at most a block of tokens from first on. */
void phases_fill(const Phases *phases, int64_t first, int64_t count);

#endif
