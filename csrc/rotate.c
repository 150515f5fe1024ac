/* Rotation of q and k on a CPU, and the norm before it: cos and sin of a block of tokens, which stay in the first cache,
 * then all their heads.
 *
 * Tensors come as four-dimensional buffers, whose shapes and strides their exporter answers for: what lies within the
 * shape is memory of the tensor. Nothing else is read or written, whatever the numbers are. */

#include <stdlib.h>

#include "phases.h"
#include "tokens.h"

/* The norm of each tensor: its weights as float32, which need not be aligned, or NULL. */
typedef struct {
    const char *weights[2];
    float eps;
} Norm;

/* Rotate tokens from first to stop; 0 without memory, −1 if a pair has an axis that is none. */
static int rotate(Job *jobs, int count, const Source *source, const Kind *kind, const Norm *norm, int64_t first,
                  int64_t stop, int conjugate) {
    int64_t pairs = kind->pairs, seq = jobs[0].shape[SEQ], channels = jobs[0].shape[CHANNELS];
    Phases phases;
    float *weights = malloc((size_t)(channels + jobs[count - 1].shape[CHANNELS]) * sizeof *weights);
    if (weights == NULL || !phases_make(&phases, source, kind->wide)) {
        free(weights);
        return 0;
    }
    order_of(kind, phases.order);
    for (int i = 0; i < count; i++) {
        jobs[i].eps = norm->eps;
        jobs[i].weight = norm->weights[i] == NULL ? NULL : weights + i * channels;
        if (jobs[i].weight != NULL) {
            weights_of(kind, phases.order, norm->weights[i], jobs[i].shape[CHANNELS], weights + i * channels);
        }
    }
    int done = phases_read(&phases) ? 1 : -1;
    for (int64_t begin = first, stretch; done == 1 && begin < stop; begin += stretch) { /* within a sequence */
        stretch = stop - begin < phases.block ? stop - begin : phases.block;
        stretch = seq - begin % seq < stretch ? seq - begin % seq : stretch;
        phases_fill(&phases, begin, stretch);
        for (int64_t i = 0; conjugate && i < stretch * pairs; i++) {
            phases.sin[i] = -phases.sin[i];
        }
        for (int i = 0; i < count; i++) {
            rotate_tokens(&jobs[i], kind, begin, stretch, phases.cos, phases.sin);
        }
    }
    free(phases.order);
    free(weights);
    return done;
}

/* Take x and out of one shape and format; 0 if they are anything else. */
static int take_job(Buffers *buffers, PyObject *x, PyObject *out, Job *job, char *format) {
    Py_buffer *from = take_buffer(buffers, x, 4, 0);
    Py_buffer *to = from == NULL ? NULL : take_buffer(buffers, out, 4, PyBUF_WRITABLE);
    if (to == NULL) {
        return 0;
    }
    *format = format_of(from);
    int fits = (*format == 'h' || *format == 'f') && format_of(to) == *format;
    for (int i = 0; i < 4; i++) {
        int moves = from->shape[i] > 1; /* the stride of a single element may be anything */
        job->shape[i] = from->shape[i];
        job->from[i] = moves ? from->strides[i] : 0;
        job->to[i] = moves ? to->strides[i] : 0;
        fits = fits && to->shape[i] == job->shape[i];
    }
    job->x = from->buf;
    job->out = to->buf;
    return fits &&
           (job->shape[CHANNELS] <= 1 || (job->from[CHANNELS] == from->itemsize && job->to[CHANNELS] == to->itemsize));
}

/* Take eps and, of each tensor, the weights of all its channels or None; 0 if they are anything else. */
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

/* Whether q, k and the phases are of the same tokens, and the range is one of them. */
static int fit(const Job *jobs, int count, const Source *source, int64_t first, int64_t stop) {
    int64_t batch = jobs[0].shape[BATCH], seq = jobs[0].shape[SEQ];
    int fits = source->pairs >= 1 && source->pairs <= INT32_MAX && seq >= 1 && batch <= source->tokens / seq &&
               batch * seq == source->tokens && 0 <= first && first <= stop && stop <= source->tokens;
    for (int i = 0; fits && i < count; i++) {
        fits =
            jobs[i].shape[BATCH] == batch && jobs[i].shape[SEQ] == seq && jobs[i].shape[CHANNELS] / 2 >= source->pairs;
    }
    return fits;
}

/* rotate(tensors, source, norm, first, stop, adjacent, conjugate, wide) -> bool, whether these tokens were rotated.
 *
 * tensors: (q, q_out, k, k_out) or (q, q_out), each (batch, seq, heads, head_dim) with contiguous channels, of float32,
 * or of int16 that hold bfloat16; an out may be what it comes from. first, stop: tokens of batch · seq.
 * source: (cos, sin), both (tokens, pairs) float32, or (ids, fixed, words, pair_axis, coefficients, factor): ids (axes,
 * tokens) int32 or int64, or int64 in units of 2**-32 if fixed; words (3, pairs) int64 and pair_axis (1, pairs) int32
 * as the operator has them, -1 for a pair that does not turn; coefficients, four float32 of sin and four of cos, as
 * bytes; the attention factor.
 * norm: None, or (eps, weight, ...), of each of q and k (head_dim,) contiguous float32 or None: first its heads x become
 * x / sqrt(mean(x^2) + eps) * weight.
 * wide: with the widest vectors of the CPU instead of those that all have; the bits are the same. */
PyObject *native_rotate(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Buffers buffers;
    Job jobs[2];
    Source source;
    Norm norm;
    char formats[2] = {0, 0};
    int taken = 0, done = -1;
    buffers.count = 0;
    (void)self;
    if (count != 8 || !PyTuple_Check(args[0]) || !PyLong_Check(args[3]) || !PyLong_Check(args[4])) {
        return PyErr_Format(PyExc_TypeError, "rotate takes tensors, a source, a norm, first, stop and three flags");
    }
    int64_t first = PyLong_AsLongLong(args[3]), stop = PyLong_AsLongLong(args[4]);
    Py_ssize_t size = PyTuple_Size(args[0]);
    if (!PyErr_Occurred() && (size == 2 || size == 4) && take_source(&buffers, args[1], &source)) {
        while (2 * taken < size && take_job(&buffers, PyTuple_GetItem(args[0], 2 * taken),
                                            PyTuple_GetItem(args[0], 2 * taken + 1), &jobs[taken], &formats[taken])) {
            taken++;
        }
        Kind kind = {source.pairs, args[5] == Py_True, formats[0] == 'h', args[7] == Py_True && has_wide()};
        if (2 * taken == size && (taken == 1 || formats[0] == formats[1]) && fit(jobs, taken, &source, first, stop) &&
            take_norm(&buffers, args[2], jobs, taken, &norm)) {
            Py_BEGIN_ALLOW_THREADS
                done = rotate(jobs, taken, &source, &kind, &norm, first, stop, args[6] == Py_True);
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
