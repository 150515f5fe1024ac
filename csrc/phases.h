/* cos and sin of the pairs of tokens, the meaning of which is in mmpos/rotary/reference.py. */

#ifndef MMPOS_PHASES_H
#define MMPOS_PHASES_H

#include "native.h"

#define MOST_AXES 8

/* What `positions` of a source are, see mmpos/rotary/reference.py; beside them those that were made elsewhere. */
enum { TABLE_INTEGER, TABLE_FRACTIONAL, DENSE_INTEGER, DENSE_FIXED, GIVEN };

/* What a rotation turns by, as it begins the bytes that mmpos/rotary/cpu.py packs: then (groups, 3, pairs) int64 words
 * of the frequencies, and (groups, pairs) int32 axes, -1 for a pair that does not turn. */
typedef struct {
    int64_t pairs, groups, axes, channels; /* as many heads follow each group; channels of a head */
    float sin_of[4], cos_of[4], factor, unused;
} Constants;

/* Where cos and sin come from: positions and constants, or tables that were made elsewhere. */
typedef struct {
    int kind;
    Matrix cos, sin;     /* (tokens, groups * pairs) float32, if given */
    Matrix positions;    /* otherwise */
    const char *words;   /* otherwise; of any alignment */
    const char *axes;    /* otherwise */
    Constants constants; /* of those given, the numbers alone */
    int64_t tokens;
    int64_t row; /* how many of them are in one row of a batch; 0 if rows may have any length */
} Source;

/* Tensor of DLPack version 0, from torch.utils.dlpack.to_dlpack. */
typedef struct {
    char *data;
    int32_t device, device_id, dimensions;
    uint8_t code, bits;
    uint16_t lanes;
    const int64_t *shape, *strides; /* in elements */
    uint64_t byte_offset;
} Tensor;

enum { CPU = 1 };                        /* of devices */
enum { INT = 0, FLOAT = 2, BFLOAT = 4 }; /* codes */

/* The tensor of a capsule, if it lies in this memory; NULL, with no exception set, if it is anything else. */
const Tensor *tensor_of(PyObject *capsule);

/* Take the tuple that rotate describes; 0 if it is anything else. */
int take_source(Buffers *buffers, PyObject *tuple, Source *source);

/* The group of heads after those that turn as this one does. */
int64_t next_group(const Source *source, int64_t group);

#define BLOCK_PAIRS 1024 /* pairs whose phases are made at a time, or those of one token */

/* Phases in an order of pairs that suits who reads them. */
typedef struct {
    const Source *source;
    int64_t group;    /* of heads, whose phases they are */
    int vectors;      /* SHORT, LONG or LONGEST */
    int64_t block;    /* tokens at a time */
    int64_t *order;   /* (pairs,) which pair stands where; the caller fills it */
    uint64_t *tau;    /* (pairs,) turns per id, in units of 2**-64 */
    float *cos, *sin; /* (block, pairs) */
    uint32_t *turn;   /* (block, pairs) */
    uint32_t *rounds; /* (pairs,) whole turns per id */
    int32_t *axis;    /* (pairs,) counted from 1; 0 for a pair that does not turn */
} Phases;

/* Make room for a block, which the caller frees at `order`; 0 without memory. */
int phases_make(Phases *phases, const Source *source, int vectors);

/* Read the frequencies of a group of heads in the order. */
void phases_read(Phases *phases, int64_t group);

/* Fill cos and sin, times the factor, of at most a block of tokens from first on. */
void phases_fill(const Phases *phases, int64_t first, int64_t count);

#endif
