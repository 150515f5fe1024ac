/* Sums over the tokens of documents in the field of integers modulo 2**61 - 1: mmpos/analysis/fingerprint.py says of
 * what. A dense sum takes one pass over the ids; that of a segment of a table is closed, and takes its logarithm. */

#include "table.h"

#define POINTS 2
#define BLOCK 256                /* powers of a point that are known */
#define LIMB 21                  /* bits of a part of a power: so many products with 32 bits add up in 64 */
#define SHIFT ((int64_t)1 << 31) /* added to int32, to make them positive */
#define PRIME (((uint64_t)1 << 61) - 1)

enum { FIRST, TOKENS, OWNER, INDEX, INVERSE, RUN_ROWS }; /* of the runs */

#ifdef __SIZEOF_INT128__
__extension__ typedef unsigned __int128 Wide;

typedef struct {
    uint64_t point;
    uint64_t powers[BLOCK];
    uint64_t ones[BLOCK + 1]; /* sums of so many powers */
    uint32_t limbs[3][BLOCK]; /* of the powers, from the low one on */
    uint64_t factors[17];     /* of every axis, then of one for each token */
} Point;

static inline uint64_t fold(uint64_t a) {
    a = (a & PRIME) + (a >> 61);
    return a >= PRIME ? a - PRIME : a;
}

static inline uint64_t add(uint64_t a, uint64_t b) {
    uint64_t sum = a + b;
    return sum >= PRIME ? sum - PRIME : sum;
}

static inline uint64_t mul(uint64_t a, uint64_t b) {
    Wide product = (Wide)a * b;
    return add((uint64_t)product & PRIME, (uint64_t)(product >> 61));
}

static inline uint64_t element(int64_t value) {
    if (value >= 0) {
        return fold((uint64_t)value);
    }
    uint64_t size = fold(0 - (uint64_t)value);
    return size == 0 ? 0 : PRIME - size;
}

static uint64_t power(uint64_t base, uint64_t exponent) {
    uint64_t result = 1;
    for (; exponent > 0; exponent >>= 1, base = mul(base, base)) {
        if (exponent & 1) {
            result = mul(result, base);
        }
    }
    return result;
}

/* Of a ratio y and n terms: y**n, and the sums of y**k and of k·y**k. */
typedef struct {
    uint64_t after, sum, moment;
} Series;

static Series series(uint64_t ratio, uint64_t terms) {
    Series s = {1, 0, 0};
    uint64_t count = 0;
    for (int bit = 63; bit >= 0; bit--) {
        if (terms >> bit == 0) {
            continue;
        }
        s.moment = add(s.moment, mul(s.after, add(s.moment, mul(count, s.sum))));
        s.sum = add(s.sum, mul(s.after, s.sum));
        s.after = mul(s.after, s.after);
        count *= 2;
        if (terms >> bit & 1) {
            s.moment = add(s.moment, mul(count, s.after));
            s.sum = add(s.sum, s.after);
            s.after = mul(s.after, ratio);
            count++;
        }
    }
    return s;
}

/* Read at most BLOCK ids, shifted; 0 for one that is no integer within int32. */
static int load(uint32_t *ids, const char *place, int64_t stride, char format, int64_t count) {
    if (format == 'i') {
        for (int64_t k = 0; k < count; k++) {
            int32_t value;
            memcpy(&value, place + k * stride, sizeof value);
            ids[k] = (uint32_t)value ^ (uint32_t)SHIFT;
        }
    } else if (format == 'q') {
        uint64_t beyond = 0;
        for (int64_t k = 0; k < count; k++) {
            uint64_t value = (uint64_t)int64_at(place + k * stride) + (uint64_t)SHIFT;
            ids[k] = (uint32_t)value;
            beyond |= value >> 32;
        }
        return beyond == 0;
    } else {
        int whole = 1;
        for (int64_t k = 0; k < count; k++) {
            double value;
            memcpy(&value, place + k * stride, sizeof value);
            int32_t near = value >= -(double)SHIFT && value < (double)SHIFT ? (int32_t)value : 0;
            whole &= (double)near == value;
            ids[k] = (uint32_t)near ^ (uint32_t)SHIFT;
        }
        return whole;
    }
    return 1;
}

/* The sum of ids, the k-th times the k-th power. */
static uint64_t sum_block(const uint32_t *ids, int64_t count, const Point *point) {
    uint64_t sums[3] = {0, 0, 0}, sum = 0;
    for (int64_t k = 0; k < count; k++) {
        for (int64_t limb = 0; limb < 3; limb++) {
            sums[limb] += (uint64_t)ids[k] * point->limbs[limb][k];
        }
    }
    for (int64_t limb = 2; limb >= 0; limb--) {
        sum = add(mul(sum, (uint64_t)1 << LIMB), fold(sums[limb]));
    }
    return add(sum, mul(PRIME - (uint64_t)SHIFT, point->ones[count]));
}

/* The sums of a run of dense ids at every point. */
static int sum_ids(const Matrix *source, const Point *points, const int64_t *run, uint64_t *sums) {
    uint64_t weights[POINTS];
    uint32_t ids[BLOCK];
    for (int64_t j = 0; j < POINTS; j++) {
        weights[j] = power(points[j].point, (uint64_t)run[INDEX]);
        sums[j] = 0;
    }
    for (int64_t done = 0; done < run[TOKENS]; done += BLOCK) {
        int64_t count = run[TOKENS] - done < BLOCK ? run[TOKENS] - done : BLOCK;
        uint64_t values[POINTS] = {0};
        for (int64_t axis = 0; axis < source->rows; axis++) {
            const char *place = source->data + axis * source->row_stride + (run[FIRST] + done) * source->column_stride;
            if (!load(ids, place, source->column_stride, source->format, count)) {
                return 0;
            }
            for (int64_t j = 0; j < POINTS; j++) {
                uint64_t sum = sum_block(ids, count, &points[j]);
                values[j] = add(values[j], mul(points[j].factors[axis], sum));
            }
        }
        for (int64_t j = 0; j < POINTS; j++) {
            uint64_t each = mul(points[j].factors[source->rows], points[j].ones[count]);
            uint64_t value = add(mul(values[j], (uint64_t)run[INVERSE]), each);
            sums[j] = add(sums[j], mul(weights[j], value));
            weights[j] = mul(weights[j], mul(points[j].powers[BLOCK - 1], points[j].point));
        }
    }
    return 1;
}

/* The sum of a segment of a table at a point: at most a part of a row, rows, frames, rows and a part of a row. */
static int segment_at(const Matrix *table, const Point *point, const int64_t *run, uint64_t *result) {
    const int64_t column = run[FIRST], axes = (table->rows - AXES) / 4;
    const int64_t skip = entry(table, SKIP, column), height = entry(table, HEIGHT, column);
    const int64_t width = entry(table, WIDTH, column);
    uint64_t terms[4] = {0, 0, 0, 0}; /* origin and steps, summed over the axes */
    if (skip < 0 || height < 1 || width < 1 || skip > INT32_MAX || height > INT32_MAX || width > INT32_MAX) {
        return 0;
    }
    for (int64_t axis = 0; axis < axes; axis++) {
        for (int64_t term = 0; term < 4; term++) {
            uint64_t value = element(entry(table, AXES + 4 * axis + term, column));
            terms[term] = add(terms[term], mul(point->factors[axis], value));
        }
    }
    for (int64_t term = 0; term < 4; term++) {
        terms[term] = mul(terms[term], (uint64_t)run[INVERSE]);
    }
    terms[ORIGIN] = add(terms[ORIGIN], point->factors[axes]);
    int64_t left = run[TOKENS], col = skip % width, row = skip / width % height, frame = skip / width / height;
    uint64_t weight = power(point->point, (uint64_t)run[INDEX]), total = 0;
    while (left > 0) {
        int64_t cols = width, rows = 1, frames = 1;
        if (col > 0 || left < width) {
            cols = width - col < left ? width - col : left;
        } else if (row > 0 || left / width < height) {
            rows = left / width < height - row ? left / width : height - row;
        } else {
            rows = height;
            frames = left / width / height;
        }
        Series along = series(point->point, (uint64_t)cols), down = series(along.after, (uint64_t)rows);
        Series on = series(down.after, (uint64_t)frames);
        uint64_t start = terms[ORIGIN];
        start = add(start, mul((uint64_t)frame, terms[STEP_FRAME]));
        start = add(start, mul((uint64_t)row, terms[STEP_ROW]));
        start = add(start, mul((uint64_t)col, terms[STEP_COL]));
        uint64_t value = add(mul(start, along.sum), mul(terms[STEP_COL], along.moment));
        value = add(mul(value, down.sum), mul(mul(terms[STEP_ROW], along.sum), down.moment));
        value = add(mul(value, on.sum), mul(mul(mul(terms[STEP_FRAME], along.sum), down.sum), on.moment));
        total = add(total, mul(weight, value));
        weight = mul(weight, on.after);
        left -= cols * rows * frames;
        if (cols < width) {
            row += col + cols == width;
            col = (col + cols) % width;
        } else {
            row += rows;
        }
        frame += row >= height ? frames : 0;
        row = row >= height ? 0 : row;
    }
    *result = total;
    return 1;
}

static int sum_segment(const Matrix *table, const Point *points, const int64_t *run, uint64_t *sums) {
    return segment_at(table, &points[0], run, &sums[0]) && segment_at(table, &points[1], run, &sums[1]);
}

typedef int Sum(const Matrix *source, const Point *points, const int64_t *run, uint64_t *sums);

static int sum_runs(const Matrix *source, Sum *sum, const Matrix *runs, const Point *points, const Matrix *out) {
    for (int64_t r = 0; r < runs->columns; r++) {
        int64_t run[RUN_ROWS], room = sum == sum_segment ? 1 : entry(runs, TOKENS, r);
        for (int64_t i = 0; i < RUN_ROWS; i++) {
            run[i] = entry(runs, i, r);
        }
        if (run[FIRST] < 0 || run[TOKENS] < 0 || run[TOKENS] > INT32_MAX + (int64_t)1 || room > source->columns ||
            run[FIRST] > source->columns - room || run[OWNER] < 0 || run[OWNER] >= out->rows || run[INDEX] < 0 ||
            run[INVERSE] < 0 || run[INVERSE] >= (int64_t)PRIME) {
            return 0;
        }
        uint64_t sums[POINTS];
        if (!sum(source, points, run, sums)) {
            return 0;
        }
        for (int64_t j = 0; j < POINTS; j++) {
            put_entry(out, run[OWNER], j, (int64_t)add(element(entry(out, run[OWNER], j)), sums[j]));
        }
    }
    return 1;
}

static void fill_points(const Matrix *powers, const Matrix *factors, Point *points) {
    for (int64_t j = 0; j < POINTS; j++) {
        for (int64_t k = 0; k < BLOCK; k++) {
            uint64_t power = element(entry(powers, j, k));
            points[j].powers[k] = power;
            points[j].ones[k + 1] = k == 0 ? power : add(points[j].ones[k], power);
            for (int64_t limb = 0; limb < 3; limb++) {
                points[j].limbs[limb][k] = (uint32_t)(power >> (LIMB * limb)) & ((1 << LIMB) - 1);
            }
        }
        for (int64_t k = 0; k < factors->columns; k++) {
            points[j].factors[k] = element(entry(factors, j, k));
        }
        points[j].ones[0] = 0;
        points[j].point = points[j].powers[1];
    }
}
#endif

/* sums(source, placed, runs, powers, factors, out) -> bool, whether the sum of every run was added to its document's.
 *
 * source: (axes, tokens) ids within int32, as int32, int64 or float64, or where placed the columns of a table,
 * whose offset and denominator are not read; runs: (5, runs) int64 first token, or the column, tokens, document, index
 * of the first token in its document, and what to multiply ids by; powers: (2, 256) int64 of both points; factors:
 * (2, axes + 1) int64; out: (documents, 2) int64. If False, out holds anything. */
PyObject *native_sums(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Buffers buffers;
    Matrix source, runs, powers, factors, out;
    int done = 0;
    (void)self;
    if (!arguments("sums", 6, count)) {
        return NULL;
    }
    buffers.count = 0;
#ifdef __SIZEOF_INT128__
    const int placed = args[1] == Py_True;
    if (take_matrix(&buffers, args[0], 0, &source) && take_matrix(&buffers, args[2], 0, &runs) &&
        take_matrix(&buffers, args[3], 0, &powers) && take_matrix(&buffers, args[4], 0, &factors) &&
        take_matrix(&buffers, args[5], PyBUF_WRITABLE, &out)) {
        int64_t axes = placed ? (source.rows - AXES) / 4 : source.rows;
        Point points[POINTS];
        int fits = (source.format == 'q' || (!placed && (source.format == 'i' || source.format == 'd'))) && axes >= 1 &&
                   axes < (int64_t)(sizeof points->factors / sizeof *points->factors) && is_block(&runs, RUN_ROWS) &&
                   is_block(&powers, POINTS) && powers.columns == BLOCK && is_block(&factors, POINTS) &&
                   factors.columns == axes + 1 && out.format == 'q' && out.columns == POINTS;
        if (fits) {
            fill_points(&powers, &factors, points);
            Py_BEGIN_ALLOW_THREADS
                done = sum_runs(&source, placed ? sum_segment : sum_ids, &runs, points, &out);
            Py_END_ALLOW_THREADS
        }
    }
#endif
    release(&buffers);
    return PyBool_FromLong(done);
}
