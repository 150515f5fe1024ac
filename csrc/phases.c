/* From positions to cos and sin: integer turns, and a polynomial in float32 whose coefficients the caller has. Every
 * product and sum is rounded by itself, in the order of mmpos/rotary/reference.py, so the bits are the same. */

#include <stdlib.h>

#include "phases.h"

enum { HI, LO, ROUNDS }; /* rows of words */

/* A matrix of contiguous rows. */
static int take_rows(Buffers *buffers, PyObject *object, Matrix *matrix) {
    return take_matrix(buffers, object, 0, matrix) &&
           (matrix->columns < 2 || matrix->column_stride == matrix->itemsize);
}

static int take_coefficients(Source *source, PyObject *object) {
    char *bytes;
    Py_ssize_t size;
    if (!PyBytes_Check(object) || PyBytes_AsStringAndSize(object, &bytes, &size) != 0 ||
        size != sizeof source->sin_of + sizeof source->cos_of) {
        return 0;
    }
    memcpy(source->sin_of, bytes, sizeof source->sin_of);
    memcpy(source->cos_of, bytes + sizeof source->sin_of, sizeof source->cos_of);
    return 1;
}

static int take_tables(Buffers *buffers, PyObject *tuple, Source *source) {
    source->given = 1;
    if (!take_rows(buffers, PyTuple_GetItem(tuple, 0), &source->cos) ||
        !take_rows(buffers, PyTuple_GetItem(tuple, 1), &source->sin)) {
        return 0;
    }
    source->tokens = source->cos.rows;
    source->pairs = source->cos.columns;
    return source->cos.format == 'f' && source->sin.format == 'f' && source->sin.rows == source->tokens &&
           source->sin.columns == source->pairs;
}

static int take_positions(Buffers *buffers, PyObject *tuple, Source *source) {
    PyObject *factor = PyTuple_GetItem(tuple, 5);
    if (!take_rows(buffers, PyTuple_GetItem(tuple, 0), &source->ids) ||
        !take_rows(buffers, PyTuple_GetItem(tuple, 2), &source->words) ||
        !take_rows(buffers, PyTuple_GetItem(tuple, 3), &source->pair_axis) ||
        !take_coefficients(source, PyTuple_GetItem(tuple, 4)) || !PyFloat_Check(factor)) {
        return 0;
    }
    source->fixed = PyTuple_GetItem(tuple, 1) == Py_True;
    source->factor = (float)PyFloat_AsDouble(factor);
    source->tokens = source->ids.columns;
    source->pairs = source->pair_axis.columns;
    return (source->ids.format == 'q' || (source->ids.format == 'i' && !source->fixed)) &&
           source->ids.rows <= MOST_AXES && source->words.format == 'q' && source->words.rows == 3 &&
           source->words.columns == source->pairs && source->pair_axis.format == 'i' && source->pair_axis.rows == 1;
}

int take_source(Buffers *buffers, PyObject *tuple, Source *source) {
    memset(source, 0, sizeof *source);
    if (PyTuple_Check(tuple) && PyTuple_Size(tuple) == 2) {
        return take_tables(buffers, tuple, source);
    }
    return PyTuple_Check(tuple) && PyTuple_Size(tuple) == 6 && take_positions(buffers, tuple, source);
}

static inline const char *cell(const Matrix *matrix, int64_t row, int64_t column) {
    return matrix->data + row * matrix->row_stride + column * matrix->itemsize;
}

static inline uint64_t word(const Matrix *words, int64_t row, int64_t column) {
    uint64_t value;
    memcpy(&value, cell(words, row, column), 8);
    return value;
}

int phases_make(Phases *phases, const Source *source, int wide) {
    size_t pairs = (size_t)source->pairs, block = pairs < BLOCK_PAIRS ? BLOCK_PAIRS / pairs : 1;
    char *room = malloc(pairs * (8 + 8 + 4 + 4) + block * pairs * (4 + 4 + 4));
    if (room == NULL) {
        return 0;
    }
    phases->source = source;
    phases->wide = wide;
    phases->block = (int64_t)block;
    phases->order = (int64_t *)room;
    phases->tau = (uint64_t *)(phases->order + pairs);
    phases->cos = (float *)(phases->tau + pairs);
    phases->sin = phases->cos + block * pairs;
    phases->turn = (uint32_t *)(phases->sin + block * pairs);
    phases->rounds = phases->turn + block * pairs;
    phases->axis = (int32_t *)(phases->rounds + pairs);
    return 1;
}

int phases_read(Phases *phases) {
    const Source *source = phases->source;
    const int64_t *order = phases->order;
    for (int64_t j = 0; j < source->pairs && !source->given; j++) {
        memcpy(&phases->axis[j], cell(&source->pair_axis, 0, order[j]), 4);
        if (phases->axis[j] < -1 || phases->axis[j] >= source->ids.rows) {
            return 0;
        }
        phases->axis[j]++; /* as turns has them: 0 is none, with an id of 0 */
        phases->tau[j] = word(&source->words, HI, order[j]) << 32 | (uint32_t)word(&source->words, LO, order[j]);
        phases->rounds[j] = (uint32_t)word(&source->words, ROUNDS, order[j]);
    }
    return 1;
}

/* The position of a token on an axis: its integer part, and its fraction in units of 2**-32. */
static inline void position(const Source *source, int64_t axis, int64_t token, int64_t *whole, uint32_t *fraction) {
    const char *at = cell(&source->ids, axis, token);
    int64_t value = 0;
    int32_t narrow;
    if (source->fixed) {
        memcpy(&value, at, 8);
        *fraction = (uint32_t)value;
        *whole = value >> 32;
        return;
    }
    memcpy(source->ids.itemsize == 8 ? (void *)&value : (void *)&narrow, at, (size_t)source->ids.itemsize);
    *fraction = 0;
    *whole = source->ids.itemsize == 8 ? (int32_t)(uint32_t)value : narrow;
}

static void turns(const Phases *p, int64_t token, uint32_t *turn) {
    const uint64_t *tau = p->tau;
    const int32_t *axes = p->axis;
    int64_t whole[MOST_AXES + 1] = {0}, pairs = p->source->pairs;
    uint32_t fraction[MOST_AXES + 1] = {0};
    for (int64_t axis = 0; axis < p->source->ids.rows; axis++) {
        position(p->source, axis, token, &whole[axis + 1], &fraction[axis + 1]);
    }
    for (int64_t j = 0; j < pairs; j++) {
        turn[j] = (uint32_t)((uint64_t)whole[axes[j]] * tau[j] >> 32);
    }
    for (int64_t j = 0; p->source->fixed && j < pairs; j++) {
        uint32_t f = fraction[axes[j]];
        turn[j] += (uint32_t)(f * (tau[j] >> 32) >> 32) + f * p->rounds[j];
    }
}

static ALWAYS_INLINE float with_sign(float value, uint32_t sign) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits ^= sign;
    memcpy(&value, &bits, 4);
    return value;
}

/* cos and sin of many turns; compilers make vectors of it. */
static ALWAYS_INLINE void cos_sin(const Source *source, int64_t count, const uint32_t *restrict turn,
                                  float *restrict cos, float *restrict sin) {
    const float s0 = source->sin_of[0], s1 = source->sin_of[1], s2 = source->sin_of[2], s3 = source->sin_of[3];
    const float c0 = source->cos_of[0], c1 = source->cos_of[1], c2 = source->cos_of[2], c3 = source->cos_of[3];
    for (int64_t j = 0; j < count; j++) {
        uint32_t quadrant = (turn[j] + (1u << 29)) >> 30;
        float u = (float)(int32_t)(turn[j] - (quadrant << 30)) * 0x1p-29f;
        float z = u * u;
        float of_sin = (((z * s3 + s2) * z + s1) * z + s0) * u;
        float of_cos = (((z * c3 + c2) * z + c1) * z + c0) * z + 1.0f;
        float first = quadrant & 1 ? of_sin : of_cos, second = quadrant & 1 ? of_cos : of_sin;
        cos[j] = with_sign(first, (quadrant + 1) << 30 & 0x80000000u);
        sin[j] = with_sign(second, quadrant << 30 & 0x80000000u);
    }
}

static void cos_sin_plain(const Phases *p, int64_t count) { cos_sin(p->source, count, p->turn, p->cos, p->sin); }

static WIDE void cos_sin_wide(const Phases *p, int64_t count) { cos_sin(p->source, count, p->turn, p->cos, p->sin); }

void phases_fill(const Phases *p, int64_t first, int64_t count) {
    const Source *source = p->source;
    int64_t pairs = source->pairs;
    for (int64_t i = 0; i < count; i++) {
        for (int64_t j = 0; source->given && j < pairs; j++) {
            memcpy(&p->cos[i * pairs + j], cell(&source->cos, first + i, p->order[j]), 4);
            memcpy(&p->sin[i * pairs + j], cell(&source->sin, first + i, p->order[j]), 4);
        }
        if (!source->given) {
            turns(p, first + i, p->turn + i * pairs);
        }
    }
    if (source->given) {
        return;
    }
    (p->wide ? cos_sin_wide : cos_sin_plain)(p, count * pairs);
    for (int64_t i = 0; source->factor != 1.0f && i < count * pairs; i++) {
        p->cos[i] *= source->factor;
        p->sin[i] *= source->factor;
    }
}
