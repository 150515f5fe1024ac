/* Tokens of tensors, rotated by cos and sin that are at hand. */

#ifndef MMPOS_TOKENS_H
#define MMPOS_TOKENS_H

#include "native.h"

enum { BATCH, SEQ, HEADS, CHANNELS };

/* A tensor, (batch, seq, heads, channels), and where it goes, which may be where it is. */
typedef struct {
    const char *x;
    char *out;
    int64_t shape[4], from[4], to[4]; /* strides in bytes */
    const float *weight;              /* (channels,) of the norm; NULL for none */
    float eps, *room;                 /* for the channels of a head */
} Job;

/* How to rotate it. */
typedef struct {
    int64_t pairs;
    int adjacent, narrow, vectors; /* narrow: bfloat16; vectors: SHORT, LONG or LONGEST */
    int normed, after;             /* whether any tensor is normalised, and after the rotation */
} Kind;

/* Where the vectors want the cos and sin of each pair: (pairs,) the pair that stands there. */
void order_of(const Kind *kind, int64_t *order);

/* Normalise and rotate all heads of tokens of one sequence by (tokens, pairs) cos and sin. */
void rotate_tokens(const Job *job, const Kind *kind, int64_t first, int64_t tokens, const float *cos, const float *sin);

#endif
