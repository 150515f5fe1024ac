/* Rotate tokens of tensors by the cos and sin computed for these tokens. */

#ifndef MMPOS_TOKENS_H
#define MMPOS_TOKENS_H

#include "native.h"

enum { BATCH, SEQ, HEADS, CHANNELS };

/* A tensor (batch, seq, heads, channels) and its destination, which may be the tensor itself. */
typedef struct {
    const char *x;
    char *out;
    int64_t shape[4], from[4], to[4]; /* strides in bytes */
    const float *weight;              /* (channels,) weights of the norm, or NULL */
    float eps, *room;                 /* room: scratch space for the channels of a head */
} Job;

/* Kind of rotation. */
typedef struct {
    int64_t pairs;
    int adjacent, narrow, vectors; /* narrow: bfloat16; vectors: SHORT, LONG or LONGEST */
    int normed, after;             /* whether any tensor is normalised, and whether that is done after the rotation */
} Kind;

/* Fill order, (pairs,), with the pair whose cos and sin the vectors expect at each place. */
void order_of(const Kind *kind, int64_t *order);

/* Normalise and rotate all heads of consecutive tokens of one sequence by cos and sin (tokens, pairs). */
void rotate_tokens(const Job *job, const Kind *kind, int64_t first, int64_t tokens, const float *cos, const float *sin);

#endif
