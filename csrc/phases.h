/* cos and sin for each pair of each token, as mmpos/rotary/reference.py defines them. */

#ifndef MMPOS_PHASES_H
#define MMPOS_PHASES_H

#include "native.h"

#define MOST_AXES 8

/* Kinds of positions that a source has, see mmpos/rotary/reference.py; GIVEN means precomputed cos and sin. */
enum { TABLE_INTEGER, TABLE_FRACTIONAL, DENSE_INTEGER, DENSE_FIXED, GIVEN };

/* Header of the constants that mmpos/rotary/cpu.py packs. (groups, 3, pairs) int64 words of the frequencies and
 * (groups, pairs) int32 axes follow it; axis -1 marks a pair that is not rotated. */
typedef struct {
    int64_t pairs, groups, axes, channels; /* groups: each of the same number of heads; channels: per head */
    float sin_of[4], cos_of[4], factor, unused;
} Constants;

/* Source of cos and sin: positions and constants, or precomputed tables. */
typedef struct {
    int kind;
    Matrix cos, sin;     /* (tokens, groups * pairs) float32, for GIVEN */
    Matrix positions;    /* for other kinds */
    const char *words;   /* for other kinds; may be unaligned */
    const char *axes;    /* for other kinds */
    Constants constants; /* for GIVEN, only the counts */
    int64_t tokens;
    int64_t row; /* tokens per row of a batch; 0 if rows may have any length */
} Source;

/* A DLPack version 0 tensor, from torch.utils.dlpack.to_dlpack. */
typedef struct {
    char *data;
    int32_t device, device_id, dimensions;
    uint8_t code, bits;
    uint16_t lanes;
    const int64_t *shape, *strides; /* in elements */
    uint64_t byte_offset;
} Tensor;

enum { CPU = 1 };                        /* device type */
enum { INT = 0, FLOAT = 2, BFLOAT = 4 }; /* type codes */

/* Return the tensor of a capsule if it is in host memory; NULL, with no exception set, for any other object. */
const Tensor *tensor_of(PyObject *capsule);

/* Read the tuple described at `rotate`; return 0 for any other object. */
int take_source(Buffers *buffers, PyObject *tuple, Source *source);

/* Return the next group of heads whose axes differ from those of this group. */
int64_t next_group(const Source *source, int64_t group);

#define BLOCK_PAIRS 1024 /* phases computed at a time (more if one token has more) */

/* Phases, with the pairs in the order that the reader needs. */
typedef struct {
    const Source *source;
    int64_t group;    /* group of heads to which the phases belong */
    int vectors;      /* SHORT, LONG or LONGEST */
    int64_t block;    /* tokens per block */
    int64_t *order;   /* (pairs,) pair at each place; filled by the caller */
    uint64_t *tau;    /* (pairs,) turns per id, in units of 2**-64 */
    float *cos, *sin; /* (block, pairs) */
    uint32_t *turn;   /* (block, pairs) */
    uint32_t *rounds; /* (pairs,) whole turns per id */
    int32_t *axis;    /* (pairs,) counted from 1; 0 for a pair that is not rotated */
} Phases;

/* Allocate a block, which the caller frees through `order`; return 0 if memory runs out. */
int phases_make(Phases *phases, const Source *source, int vectors);

/* Read the frequencies of a group of heads in the order of `order`. */
void phases_read(Phases *phases, int64_t group);

/* Fill cos and sin, times the factor, for up to a block of tokens from `first`. */
void phases_fill(const Phases *phases, int64_t first, int64_t count);

#endif
