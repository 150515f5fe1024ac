/* Compute cos and sin of positions: integer turns, then a float32 polynomial with the caller's coefficients. Products
 * and sums are rounded one by one in the same order as in mmpos/rotary/reference.py, so the results are
 * bit-identical. */

#include <stdlib.h>

#include "phases.h"
#include "table.h"

enum { HI, LO, ROUNDS, WORDS }; /* rows of the words */

const Tensor *tensor_of(PyObject *capsule) {
    const Tensor *tensor = PyCapsule_GetPointer(capsule, "dltensor");
    if (tensor == NULL) {
        PyErr_Clear();
        return NULL;
    }
    int elements = 1; /* whether the tensor has elements */
    for (int i = 0; i < tensor->dimensions; i++) {
        elements = elements && tensor->shape[i] > 0;
    }
    return tensor->device == CPU && tensor->lanes == 1 && (tensor->data != NULL || !elements) ? tensor : NULL;
}

/* Read an integer tensor (rows, columns) or (rows, batch, seq) with contiguous, nonempty rows; return 0 for any other
 * object. Set seq to the number of tokens in a row of the batch. */
static int take_integers(PyObject *capsule, Matrix *matrix, int64_t *seq) {
    const Tensor *tensor = tensor_of(capsule);
    if (tensor == NULL || tensor->code != INT || (tensor->bits != 32 && tensor->bits != 64) || tensor->dimensions < 2 ||
        tensor->dimensions > 3) {
        return 0;
    }
    int batched = tensor->dimensions == 3;
    const int64_t *shape = tensor->shape, *strides = tensor->strides;
    int64_t batch = batched ? shape[1] : 1, length = batched ? shape[2] : shape[1];
    if (shape[0] < 1 || batch < 1 || length < 1 || (length > 1 && strides[batched + 1] != 1) ||
        (batch > 1 && strides[1] != length)) {
        return 0;
    }
    matrix->itemsize = tensor->bits / 8;
    matrix->data = tensor->data + tensor->byte_offset;
    matrix->rows = shape[0];
    matrix->columns = batch * length; /* contiguous in memory, so the product cannot overflow */
    matrix->row_stride = shape[0] > 1 ? strides[0] * matrix->itemsize : 0;
    matrix->column_stride = matrix->itemsize;
    matrix->format = tensor->bits == 32 ? 'i' : 'q';
    *seq = batched ? length : 0;
    return 1;
}

/* Get a matrix with contiguous rows. */
static int take_rows(Buffers *buffers, PyObject *object, Matrix *matrix) {
    return take_matrix(buffers, object, 0, matrix) &&
           (matrix->columns < 2 || matrix->column_stride == matrix->itemsize);
}

static inline const char *cell(const Matrix *matrix, int64_t row, int64_t column) {
    return matrix->data + row * matrix->row_stride + column * matrix->itemsize;
}

static inline uint64_t word(const Source *source, int64_t group, int64_t row, int64_t pair) {
    return (uint64_t)int64_at(source->words + 8 * ((group * WORDS + row) * source->constants.pairs + pair));
}

static inline int32_t axis_of(const Source *source, int64_t group, int64_t pair) {
    int32_t axis;
    memcpy(&axis, source->axes + 4 * (group * source->constants.pairs + pair), 4);
    return axis;
}

static inline int is_table(const Source *source) {
    return source->kind == TABLE_INTEGER || source->kind == TABLE_FRACTIONAL;
}

static int take_tables(Buffers *buffers, PyObject *tuple, Source *source) {
    Constants *constants = &source->constants;
    source->kind = GIVEN;
    constants->groups = PyLong_AsLongLong(PyTuple_GetItem(tuple, 2));
    if (constants->groups < 1 || !take_rows(buffers, PyTuple_GetItem(tuple, 0), &source->cos) ||
        !take_rows(buffers, PyTuple_GetItem(tuple, 1), &source->sin)) {
        return 0;
    }
    source->tokens = source->cos.rows;
    constants->pairs = source->cos.columns / constants->groups;
    return source->cos.format == 'f' && source->sin.format == 'f' && source->sin.rows == source->tokens &&
           source->sin.columns == source->cos.columns && constants->pairs * constants->groups == source->cos.columns;
}

/* Read the constants that cpu.py packs; return 0 if the size or an axis is wrong. */
static int take_constants(PyObject *object, int64_t axes, Source *source) {
    Constants *constants = &source->constants;
    char *bytes;
    Py_ssize_t size, left;
    if (!PyBytes_Check(object) || PyBytes_AsStringAndSize(object, &bytes, &size) != 0 ||
        size < (Py_ssize_t)sizeof *constants) {
        return 0;
    }
    memcpy(constants, bytes, sizeof *constants);
    left = size - (Py_ssize_t)sizeof *constants;
    if (constants->axes != axes || constants->pairs < 1 || constants->groups < 1 || constants->pairs > left ||
        left % constants->pairs != 0 || left / constants->pairs % (8 * WORDS + 4) != 0 ||
        left / constants->pairs / (8 * WORDS + 4) != constants->groups) {
        return 0;
    }
    source->words = bytes + sizeof *constants;
    source->axes = source->words + 8 * WORDS * constants->groups * constants->pairs;
    int known = 1;
    for (int64_t i = 0; i < constants->groups * constants->pairs; i++) {
        int32_t axis = axis_of(source, 0, i);
        known = known && axis >= -1 && axis < axes;
    }
    return known;
}

static int take_positions(Buffers *buffers, PyObject *tuple, Source *source) {
    Matrix *positions = &source->positions;
    PyObject *object = PyTuple_GetItem(tuple, 0);
    int64_t kind = PyLong_AsLongLong(PyTuple_GetItem(tuple, 1)), row = 0;
    int capsule = PyCapsule_CheckExact(object);
    source->tokens = PyLong_AsLongLong(PyTuple_GetItem(tuple, 2));
    source->row = PyLong_AsLongLong(PyTuple_GetItem(tuple, 3));
    if (PyErr_Occurred() ||
        !(capsule ? take_integers(object, positions, &row) : take_rows(buffers, object, positions)) ||
        kind < TABLE_INTEGER || kind > DENSE_FIXED || (row != 0 && kind < DENSE_INTEGER)) {
        return 0;
    }
    source->kind = (int)kind;
    if (capsule && !is_table(source)) {
        source->tokens = positions->columns;
        source->row = row;
    }
    int64_t axes = is_table(source) ? (positions->rows - AXES) / 4 : positions->rows;
    int fits = is_table(source) ? positions->columns > 0 : positions->columns == source->tokens;
    return fits && axes >= 1 && axes <= MOST_AXES && take_constants(PyTuple_GetItem(tuple, 4), axes, source) &&
           (positions->format == 'q' || (positions->format == 'i' && kind == DENSE_INTEGER));
}

int take_source(Buffers *buffers, PyObject *tuple, Source *source) {
    memset(source, 0, sizeof *source);
    Py_ssize_t size = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : 0;
    return size == 3 ? take_tables(buffers, tuple, source) : size == 5 && take_positions(buffers, tuple, source);
}

int64_t next_group(const Source *source, int64_t group) {
    size_t row = 4 * (size_t)source->constants.pairs, words = 8 * WORDS * (size_t)source->constants.pairs;
    const char *axes = source->axes + (size_t)group * row, *of = source->words + (size_t)group * words;
    int64_t next = group + 1;
    while (source->kind != GIVEN && next < source->constants.groups &&
           memcmp(axes, source->axes + (size_t)next * row, row) == 0 &&
           memcmp(of, source->words + (size_t)next * words, words) == 0) {
        next++;
    }
    return next;
}

int phases_make(Phases *phases, const Source *source, int vectors) {
    size_t pairs = (size_t)source->constants.pairs, block = pairs < BLOCK_PAIRS ? BLOCK_PAIRS / pairs : 1;
    char *room = malloc(pairs * (8 + 8 + 4 + 4) + block * pairs * (4 + 4 + 4));
    if (room == NULL) {
        return 0;
    }
    phases->source = source;
    phases->vectors = vectors;
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

void phases_read(Phases *phases, int64_t group) {
    const Source *source = phases->source;
    phases->group = group;
    for (int64_t j = 0; j < source->constants.pairs && source->kind != GIVEN; j++) {
        int64_t pair = phases->order[j];
        phases->axis[j] = axis_of(source, group, pair) + 1; /* 0 means no axis, with id 0 */
        phases->tau[j] = word(source, group, HI, pair) << 32 | (uint32_t)word(source, group, LO, pair);
        phases->rounds[j] = (uint32_t)word(source, group, ROUNDS, pair);
    }
}

/* A position on every axis: integer part, and fraction in units of 2**-32. Entry 0 is for pairs without an axis and is
 * always 0. Numbers outside the range of ids wrap around. */
typedef struct {
    int32_t whole[MOST_AXES + 1];
    uint32_t fraction[MOST_AXES + 1];
} Position;

/* Return the last column of a table that begins at or before a token. */
static int64_t column_of(const Matrix *table, int64_t token) {
    int64_t low = 0, high = table->columns;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (entry(table, OFFSET, middle) <= token) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

static inline int64_t divisor(const Matrix *table, int64_t row, int64_t column) {
    int64_t value = entry(table, row, column);
    return value < 1 ? 1 : value;
}

static void place_in_table(const Source *source, int64_t column, int64_t token, Position *position) {
    const Matrix *table = &source->positions;
    int64_t index = plus(entry(table, SKIP, column), minus(token, entry(table, OFFSET, column)));
    int64_t width = divisor(table, WIDTH, column), height = divisor(table, HEIGHT, column);
    int64_t line = index / width, col = index % width, row = line % height, frame = line / height;
    for (int64_t axis = 0, at = AXES; at + STEP_COL < table->rows; axis++, at += 4) {
        uint64_t sum = (uint64_t)entry(table, at + ORIGIN, column);
        sum += (uint64_t)frame * (uint64_t)entry(table, at + STEP_FRAME, column);
        sum += (uint64_t)row * (uint64_t)entry(table, at + STEP_ROW, column);
        sum += (uint64_t)col * (uint64_t)entry(table, at + STEP_COL, column);
        int64_t whole = (int64_t)sum;
        if (source->kind == TABLE_FRACTIONAL) {
            int64_t denominator = divisor(table, DENOMINATOR, column), rest = (int64_t)sum % denominator;
            whole = (int64_t)sum / denominator - (rest < 0);
            rest += rest < 0 ? denominator : 0;
            position->fraction[axis + 1] = (uint32_t)(((uint64_t)rest << 32) / (uint64_t)denominator);
        }
        position->whole[axis + 1] = (int32_t)(uint32_t)(uint64_t)whole;
    }
}

static void place_densely(const Source *source, int64_t token, Position *position) {
    for (int64_t axis = 0; axis < source->positions.rows; axis++) {
        const char *at = cell(&source->positions, axis, token);
        if (source->positions.itemsize == 4) {
            memcpy(&position->whole[axis + 1], at, 4);
            continue;
        }
        uint64_t value = (uint64_t)int64_at(at);
        position->fraction[axis + 1] = source->kind == DENSE_FIXED ? (uint32_t)value : 0;
        position->whole[axis + 1] = (int32_t)(uint32_t)(source->kind == DENSE_FIXED ? value >> 32 : value);
    }
}

static ALWAYS_INLINE void turns(const Phases *p, const Position *position, uint32_t *turn) {
    const uint64_t *tau = p->tau;
    const int32_t *axes = p->axis;
    int64_t pairs = p->source->constants.pairs;
    for (int64_t j = 0; j < pairs; j++) {
        turn[j] = (uint32_t)((uint64_t)(int64_t)position->whole[axes[j]] * tau[j] >> 32);
    }
    if (p->source->kind == TABLE_FRACTIONAL || p->source->kind == DENSE_FIXED) {
        for (int64_t j = 0; j < pairs; j++) {
            uint32_t f = position->fraction[axes[j]];
            turn[j] += (uint32_t)(f * (tau[j] >> 32) >> 32) + f * p->rounds[j];
        }
    }
}

static ALWAYS_INLINE float with_sign(float value, uint32_t sign) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits ^= sign;
    memcpy(&value, &bits, 4);
    return value;
}

/* Compute cos and sin of turns in a loop that compilers can vectorise. */
static ALWAYS_INLINE void cos_sin(const Source *source, int64_t count, const uint32_t *restrict turn,
                                  float *restrict cos, float *restrict sin) {
    const float *of = source->constants.sin_of, s0 = of[0], s1 = of[1], s2 = of[2], s3 = of[3];
    const float *too = source->constants.cos_of, c0 = too[0], c1 = too[1], c2 = too[2], c3 = too[3];
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

static void copy_given(const Phases *p, int64_t first, int64_t count) {
    const Source *source = p->source;
    int64_t pairs = source->constants.pairs, begin = p->group * pairs;
    for (int64_t i = 0; i < count; i++) {
        for (int64_t j = 0; j < pairs; j++) {
            memcpy(&p->cos[i * pairs + j], cell(&source->cos, first + i, begin + p->order[j]), 4);
            memcpy(&p->sin[i * pairs + j], cell(&source->sin, first + i, begin + p->order[j]), 4);
        }
    }
}

static ALWAYS_INLINE void fill(const Phases *p, int64_t first, int64_t count) {
    const Source *source = p->source;
    const Matrix *table = &source->positions;
    int64_t pairs = source->constants.pairs;
    int by_table = is_table(source);
    int64_t column = by_table ? column_of(table, first) : 0;
    Position position = {{0}, {0}};
    for (int64_t i = 0; i < count; i++) {
        while (by_table && column + 1 < table->columns && entry(table, OFFSET, column + 1) <= first + i) {
            column++;
        }
        if (by_table) {
            place_in_table(source, column, first + i, &position);
        } else {
            place_densely(source, first + i, &position);
        }
        turns(p, &position, p->turn + i * pairs);
    }
    cos_sin(source, count * pairs, p->turn, p->cos, p->sin);
    float factor = source->constants.factor;
    for (int64_t i = 0; factor != 1.0f && i < count * pairs; i++) {
        p->cos[i] *= factor;
        p->sin[i] *= factor;
    }
}

static void fill_short(const Phases *p, int64_t first, int64_t count) { fill(p, first, count); }

static WIDE void fill_long(const Phases *p, int64_t first, int64_t count) { fill(p, first, count); }

static WIDEST void fill_longest(const Phases *p, int64_t first, int64_t count) { fill(p, first, count); }

void phases_fill(const Phases *p, int64_t first, int64_t count) {
    void (*const fills[])(const Phases *, int64_t, int64_t) = {fill_short, fill_long, fill_longest};
    (p->source->kind == GIVEN ? copy_given : fills[p->vectors])(p, first, count);
}
