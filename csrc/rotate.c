/* Rotate and normalise q and k on a CPU. For each block of tokens, compute cos and sin, which stay in the L1 cache,
 * then rotate all heads of the block.
 *
 * Tensors are DLPack capsules. torch guarantees that their shapes and strides describe the tensor's own memory; nothing
 * else is read or written, whatever the values of the numbers. */

#include <math.h>
#include <stdlib.h>

#include "phases.h"
#include "tokens.h"

/* The norm of each tensor: float32 weights, which may be unaligned, or NULL. */
typedef struct {
    const char *weights[2];
    float eps;
} Norm;

/* Rotate tokens from first to stop; return 0 if memory runs out. */
static int rotate(const Job *jobs, int count, const Source *source, const Kind *kind, const Norm *norm, int64_t first,
                  int64_t stop, int conjugate) {
    int64_t pairs = kind->pairs, seq = jobs[0].shape[SEQ], channels = jobs[0].shape[CHANNELS];
    Phases phases;
    float *weights = malloc((size_t)(count + 1) * (size_t)channels * sizeof *weights);
    if (weights == NULL || !phases_make(&phases, source, kind->vectors)) {
        free(weights);
        return 0;
    }
    order_of(kind, phases.order);
    for (int i = 0; i < count; i++) {
        for (int64_t c = 0; norm->weights[i] != NULL && c < channels; c++) {
            float *weight = &weights[i * channels + c];
            memcpy(weight, norm->weights[i] + 4 * c, 4);
            *weight = isnan(*weight) ? NAN : *weight; /* a NaN with zero low bits; see ROUNDED in heads.h */
        }
    }
    for (int64_t group = 0, next; group < source->constants.groups; group = next) {
        Job parts[2];
        next = next_group(source, group);
        for (int i = 0; i < count; i++) {
            int64_t heads = jobs[i].shape[HEADS] / source->constants.groups;
            parts[i] = jobs[i];
            parts[i].x += group * heads * jobs[i].from[HEADS];
            parts[i].out += group * heads * jobs[i].to[HEADS];
            parts[i].shape[HEADS] = (next - group) * heads;
            parts[i].eps = norm->eps;
            parts[i].room = weights + count * channels;
            parts[i].weight = norm->weights[i] == NULL ? NULL : weights + i * channels;
        }
        phases_read(&phases, group);
        for (int64_t begin = first, stretch; begin < stop; begin += stretch) { /* no stretch spans two sequences */
            stretch = stop - begin < phases.block ? stop - begin : phases.block;
            stretch = seq - begin % seq < stretch ? seq - begin % seq : stretch;
            phases_fill(&phases, begin, stretch);
            for (int64_t i = 0; conjugate && i < stretch * pairs; i++) {
                phases.sin[i] = -phases.sin[i];
            }
            for (int i = 0; i < count; i++) {
                rotate_tokens(&parts[i], kind, begin, stretch, phases.cos, phases.sin);
            }
        }
    }
    free(phases.order);
    free(weights);
    return 1;
}

/* Dimensions and dtype of a tensor: bfloat16 or float32. */
typedef struct {
    int dimensions, narrow;
} Form;

static int alike(Form a, Form b) { return a.dimensions == b.dimensions && a.narrow == b.narrow; }

/* Get a tensor (batch, seq, heads, channels), or one without a batch dimension, with contiguous channels, and its
 * strides in bytes; return NULL for any other object. */
static char *take_tensor(PyObject *object, int heads_first, int64_t *shape, int64_t *strides, Form *form) {
    const Tensor *tensor = tensor_of(object);
    if (tensor == NULL) {
        return NULL;
    }
    form->dimensions = tensor->dimensions;
    form->narrow = tensor->code == BFLOAT && tensor->bits == 16;
    int missing = 4 - tensor->dimensions, known = form->narrow || (tensor->code == FLOAT && tensor->bits == 32);
    if (!known || missing < 0 || missing > !heads_first) {
        return NULL;
    }
    shape[BATCH] = 1;
    strides[BATCH] = 0;
    for (int i = 0; i < tensor->dimensions; i++) {
        int at = i + missing;
        at = heads_first && (at == SEQ || at == HEADS) ? SEQ + HEADS - at : at;
        shape[at] = tensor->shape[i];
        strides[at] = shape[at] > 1 ? tensor->strides[i] * (tensor->bits / 8)
                                    : 0; /* the stride of a single element may be anything */
    }
    int contiguous = shape[CHANNELS] <= 1 || strides[CHANNELS] == tensor->bits / 8;
    return contiguous ? tensor->data + tensor->byte_offset : NULL;
}

/* Get x and out, which must have the same shape and dtype; return 0 for anything else. */
static int take_job(PyObject *x, PyObject *out, int heads_first, Job *job, Form *form) {
    int64_t shape[4];
    Form other;
    job->x = take_tensor(x, heads_first, job->shape, job->from, form);
    if (job->x != NULL && out == Py_None) {
        job->out = (char *)job->x;
        memcpy(job->to, job->from, sizeof job->to);
        return 1;
    }
    job->out = job->x == NULL ? NULL : take_tensor(out, heads_first, shape, job->to, &other);
    return job->out != NULL && alike(*form, other) && memcmp(shape, job->shape, sizeof shape) == 0;
}

/* Read eps and, for each tensor, the weights of all its channels or None; return 0 for any other object. */
static int take_norm(Buffers *buffers, PyObject *tuple, const Job *jobs, int count, Norm *norm) {
    memset(norm, 0, sizeof *norm);
    if (tuple == Py_None) {
        return 1;
    }
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != count + 1 || !PyFloat_Check(PyTuple_GetItem(tuple, 0))) {
        return 0;
    }
    norm->eps = (float)PyFloat_AsDouble(PyTuple_GetItem(tuple, 0));
    for (int i = 0; i < count; i++) {
        PyObject *object = PyTuple_GetItem(tuple, i + 1);
        if (object == Py_None) {
            continue;
        }
        Py_buffer *weight = take_flat(buffers, object, 'f', 0);
        if (weight == NULL || weight->ndim != 1 || weight->shape[0] != jobs[i].shape[CHANNELS]) {
            return 0;
        }
        norm->weights[i] = weight->buf;
    }
    return 1;
}

/* Return whether q, k and the phases have the same numbers of tokens and channels. */
static int fit(const Job *jobs, int count, const Source *source) {
    const Constants *constants = &source->constants;
    int64_t batch = jobs[0].shape[BATCH], seq = jobs[0].shape[SEQ], channels = jobs[0].shape[CHANNELS];
    int fits = constants->pairs >= 1 && constants->pairs <= channels / 2 && channels <= INT32_MAX && seq >= 1 &&
               batch <= source->tokens / seq && batch * seq == source->tokens &&
               (source->kind == GIVEN || constants->channels == channels) &&
               (batch == 1 || source->row == 0 || source->row == seq);
    for (int i = 0; fits && i < count; i++) {
        fits = jobs[i].shape[BATCH] == batch && jobs[i].shape[SEQ] == seq && jobs[i].shape[CHANNELS] == channels &&
               jobs[i].shape[HEADS] % constants->groups == 0;
    }
    return fits;
}

/* Return whether quick checks show that no two elements of a tensor, each of this size, share memory. */
static int apart(const Job *jobs, int count, int64_t size) {
    const char *stops[2];
    for (int i = 0; i < count; i++) {
        const int64_t *shape = jobs[i].shape, *steps = jobs[i].to;
        int64_t reach = size;
        for (int d = 0; d < 4; d++) {
            int64_t below = size;
            for (int other = 0; other < 4; other++) {
                below += other != d && steps[other] <= steps[d] ? (shape[other] - 1) * steps[other] : 0;
            }
            if (shape[d] > 1 && steps[d] < below) {
                return 0;
            }
            reach += (shape[d] - 1) * steps[d];
        }
        stops[i] = jobs[i].out + reach;
    }
    return count == 1 || stops[0] <= jobs[1].out || stops[1] <= jobs[0].out;
}

#define MOST_PARTS (1 << 20)

/* Return the first token of a part. */
static int64_t first_of(const Source *source, int64_t part, int64_t parts) {
    return source->tokens / parts * part + source->tokens % parts * part / parts;
}

/* Return whether all ids are within int32. */
static int within_int32(const Source *source) {
    const Matrix *ids = &source->positions;
    int64_t beyond = 0;
    for (int64_t axis = 0; source->kind == DENSE_INTEGER && ids->itemsize == 8 && axis < ids->rows; axis++) {
        for (int64_t i = 0; i < ids->columns; i++) {
            int64_t id = int64_at(ids->data + axis * ids->row_stride + 8 * i);
            beyond |= id ^ (int32_t)(uint32_t)(uint64_t)id;
        }
    }
    return beyond == 0;
}

enum {
    ADJACENT = 1,
    CONJUGATE = 2,
    HEADS_FIRST = 4,
    APART = 8,
    NORM_AFTER = 16,
    CHECKED = 32,
    NOT_LONG = 64,
    NOT_LONGEST = 128
}; /* see mmpos/rotary/cpu.py */

/* rotate(tensors, source, norm, part, parts, flags) -> bool: True if the tokens of a part were rotated.
 *
 * tensors: (q, q_out, k, k_out) or (q, q_out), DLPack capsules, each (batch, seq, heads, head_dim) or (tokens, heads,
 *   head_dim) with contiguous channels, in float32 or bfloat16; an output that is None or equals its input means that
 *   the input is rotated in place.
 * source: (positions, kind, tokens, row, constants) or (cos, sin, groups), cos and sin (tokens, groups * pairs)
 *   float32.
 *   positions: table (5 + 4*axes, segments) int64, ids (axes, tokens) int32 or int64, or int64 in units of 2**-32,
 *   depending on kind, in a buffer or a capsule. A capsule may have ids (axes, batch, seq), whose shape defines tokens
 *   and row.
 *   row: tokens per row of a batch, 0 if rows may have any length. constants: bytes, see Constants.
 * norm: None, or (eps, weight, ...) with a weight for q and for k, (head_dim,) contiguous float32 or None. Each head x
 *   is first replaced by x / sqrt(mean(x^2) + eps) * weight.
 * part, parts: index of the part, and number of parts, which have about the same number of tokens each.
 * flags: ADJACENT: pairs of adjacent channels; CONJUGATE: negated angles; HEADS_FIRST: (batch, heads, seq, head_dim);
 *   APART: decline outputs whose elements may share memory; NORM_AFTER: normalise after the rotation; CHECKED: decline
 *   ids outside int32; NOT_LONG, NOT_LONGEST: do not use the CPU's wider vectors, which does not change the results. */
PyObject *native_rotate(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Buffers buffers;
    Job jobs[2];
    Source source;
    Norm norm;
    Form forms[2];
    int taken = 0, done = -1;
    buffers.count = 0;
    (void)self;
    if (count != 6 || !PyTuple_Check(args[0]) || !PyLong_Check(args[3]) || !PyLong_Check(args[4]) ||
        !PyLong_Check(args[5])) {
        return PyErr_Format(PyExc_TypeError, "rotate takes tensors, a source, a norm, a part, parts and flags");
    }
    int64_t part = PyLong_AsLongLong(args[3]), parts = PyLong_AsLongLong(args[4]), flags = PyLong_AsLongLong(args[5]);
    Py_ssize_t size = PyTuple_Size(args[0]);
    if (!PyErr_Occurred() && 0 <= part && part < parts && parts <= MOST_PARTS && (size == 2 || size == 4) &&
        take_source(&buffers, args[1], &source)) {
        int heads_first = (flags & HEADS_FIRST) != 0;
        while (2 * taken < size &&
               take_job(PyTuple_GetItem(args[0], 2 * taken), PyTuple_GetItem(args[0], 2 * taken + 1), heads_first,
                        &jobs[taken], &forms[taken])) {
            taken++;
        }
        if (2 * taken == size && (taken == 1 || alike(forms[0], forms[1])) && fit(jobs, taken, &source) &&
            take_norm(&buffers, args[2], jobs, taken, &norm) && ((flags & CHECKED) == 0 || within_int32(&source)) &&
            ((flags & APART) == 0 || apart(jobs, taken, forms[0].narrow ? 2 : 4))) {
            int most = flags & NOT_LONG ? SHORT : flags & NOT_LONGEST ? LONG : LONGEST, vectors = longest();
            Kind kind = {source.constants.pairs,          (flags & ADJACENT) != 0, forms[0].narrow,
                         vectors < most ? vectors : most, args[2] != Py_None,      (flags & NORM_AFTER) != 0};
            Py_BEGIN_ALLOW_THREADS
                done = rotate(jobs, taken, &source, &kind, &norm, first_of(&source, part, parts),
                              first_of(&source, part + 1, parts), (flags & CONJUGATE) != 0);
            Py_END_ALLOW_THREADS
        }
    }
    release(&buffers);
    if (done == 0) {
        return PyErr_NoMemory();
    }
    PyErr_Clear();
    return PyBool_FromLong(done == 1);
}
