/* Sums over the tokens of documents in the field of integers modulo 2**61 - 1: mmpos/analysis/fingerprint.py says of
 * what. A dense sum takes one pass over the ids; that of a segment of a table is closed, and takes its logarithm. */

#include <math.h>

#include "table.h"

#define POINTS 2
#define MOST_AXES 16
#define BLOCK 256                 /* powers of a point that are known */
#define STRETCH 8                 /* least tokens of one denominator that are summed before they are divided by it */
#define KNOWN 16                  /* denominators whose inverses are kept */
#define LIMB 31                   /* bits of the lower part of a power; the upper one has 30 */
#define SMALL 25                  /* bits of ids of which a block's products with a part add up in 64 */
#define HALF 16                   /* bits of a half of other ids */
#define MIDDLE 6755399441055744.0 /* 1.5 * 2**52: what is added to it is rounded to an integer */
#define SHIFT ((uint64_t)1 << 31) /* added to int32, to make them positive */
#define PRIME (((uint64_t)1 << 61) - 1)

enum { FIRST, TOKENS, OWNER, INDEX, RUN_ROWS }; /* of the runs */

#ifdef __SIZEOF_INT128__
__extension__ typedef unsigned __int128 Wide;

typedef struct {
    uint64_t point, after;               /* to the first power, and to the one after a block */
    uint64_t ones[BLOCK + 1];            /* sums of so many powers */
    uint32_t lower[BLOCK], upper[BLOCK]; /* parts of the powers */
    uint64_t factors[MOST_AXES + 1];     /* of every axis, then of one for each token */
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

static inline uint64_t known_power(const Point *point, int64_t exponent) {
    return point->lower[exponent] | (uint64_t)point->upper[exponent] << LIMB;
}

/* What the ids of every column are numerators over, if there is anything; and inverses, each where its last bits say. */
typedef struct {
    Vector each;
    int given;
    int64_t known[KNOWN];
    uint64_t inverses[KNOWN];
} Over;

static inline int is_denominator(int64_t value) { return value >= 1 && value <= INT32_MAX; }

/* The inverse of the denominator of a column; 0 if it is none. */
static uint64_t inverse_at(Over *over, int64_t column) {
    if (!over->given) {
        return 1;
    }
    int64_t value = item(&over->each, column), slot = value & (KNOWN - 1);
    if (!is_denominator(value)) {
        return 0;
    }
    if (over->known[slot] != value) {
        over->known[slot] = value;
        over->inverses[slot] = power((uint64_t)value, PRIME - 2);
    }
    return over->inverses[slot];
}

/* How many of so many columns come before STRETCH of one denominator; 0 if these are the first. */
static int64_t mixed_columns(const Over *over, int64_t column, int64_t count) {
    if (!over->given || over->each.stride == 0) {
        return 0;
    }
    for (int64_t k = 1, same = 1; k < count; k++) {
        same = item(&over->each, column + k) == item(&over->each, column + k - 1) ? same + 1 : 1;
        if (same == STRETCH) {
            return k + 1 - STRETCH;
        }
    }
    return count;
}

/* How many of so many columns have the denominator of the first. */
static int64_t equal_columns(const Over *over, int64_t column, int64_t count) {
    int64_t k = 1;
    if (!over->given || over->each.stride == 0) {
        return count;
    }
    while (k < count && item(&over->each, column + k) == item(&over->each, column)) {
        k++;
    }
    return k;
}

/* The powers of every point over the denominators of at most BLOCK columns; 0 if one is none. One inversion serves all:
 * that of their product, which the others undo, one by one. */
static int divide_powers(const Over *over, int64_t column, int64_t count, const Point *points,
                         uint64_t weights[POINTS][BLOCK]) {
    uint64_t before[BLOCK], product = 1;
    for (int64_t k = 0; k < count; k++) {
        int64_t value = item(&over->each, column + k);
        if (!is_denominator(value)) {
            return 0;
        }
        before[k] = product;
        product = mul(product, (uint64_t)value);
    }
    product = power(product, PRIME - 2);
    for (int64_t k = count - 1; k >= 0; k--) {
        uint64_t inverse = mul(before[k], product);
        product = mul(product, (uint64_t)item(&over->each, column + k));
        for (int64_t j = 0; j < POINTS; j++) {
            weights[j][k] = mul(inverse, known_power(&points[j], k));
        }
    }
    return 1;
}

/* Of a ratio y and n terms: y**n, and the sums of y**k and of k·y**k. */
typedef struct {
    uint64_t after, sum, moment;
} Series;

static Series series(uint64_t ratio, uint64_t terms) {
    Series s = {ratio, 1, 0};
    uint64_t count = 1; /* of terms */
    int bit = 0;
    while (terms >> bit > 1) {
        bit++;
    }
    while (--bit >= 0) {
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

/* What the floats of an axis are numerators over, and its inverse in the field. */
typedef struct {
    double over;
    uint64_t inverse;
} Unit;

static inline double float_at(const char *place, char format) {
    float single;
    double number;
    if (format == 'f') {
        memcpy(&single, place, sizeof single);
        return single;
    }
    memcpy(&number, place, sizeof number);
    return number;
}

/* Whether a number is the double of an integer over such a denominator, and of nothing over a smaller one. */
static ALWAYS_INLINE int is_over(double number, double over, double numerator) {
    return (over == 1 || over * over * fabs(number) < 4503599627370496.0 /* 2**52 */) & (numerator / over == number);
}

/* Read at most BLOCK ids times over; 0 if one is no integer within int32 then, and else 1 and the bits that any has. */
static ALWAYS_INLINE int load_as(char format, int64_t stride, const char *place, double over, int64_t count,
                                 uint32_t *ids, uint32_t *any) {
    const double middle = MIDDLE;
    uint64_t beyond = 0, zero;
    uint32_t seen = 0;
    memcpy(&zero, &middle, sizeof zero);
    for (int64_t k = 0; k < count; k++) {
        uint64_t value;
        if (format == 'i') {
            int32_t number;
            memcpy(&number, place + k * stride, sizeof number);
            value = (uint64_t)number + SHIFT;
        } else if (format == 'q') {
            value = (uint64_t)int64_at(place + k * stride) + SHIFT;
        } else {
            double number = float_at(place + k * stride, format), rounded = number * over + middle;
            beyond |= !is_over(number, over, rounded - middle);
            memcpy(&value, &rounded, sizeof value);
            value += SHIFT - zero;
        }
        beyond |= value >> 32;
        ids[k] = (uint32_t)(value - SHIFT);
        seen |= ids[k];
    }
    *any = seen;
    return beyond == 0;
}

/* The same for any format, by vectors where ids lie side by side. */
static ALWAYS_INLINE int load(const Matrix *source, const char *place, double over, int64_t count, uint32_t *ids,
                              uint32_t *any) {
    const int64_t stride = source->column_stride;
    const int dense = stride == source->itemsize;
    switch (source->format) {
        case 'i':
            return dense ? load_as('i', 4, place, 1, count, ids, any) : load_as('i', stride, place, 1, count, ids, any);
        case 'q':
            return dense ? load_as('q', 8, place, 1, count, ids, any) : load_as('q', stride, place, 1, count, ids, any);
        case 'f':
            return dense ? load_as('f', 4, place, over, count, ids, any)
                         : load_as('f', stride, place, over, count, ids, any);
        default:
            return dense ? load_as('d', 8, place, over, count, ids, any)
                         : load_as('d', stride, place, over, count, ids, any);
    }
}

/* The denominator, of the first convergent of its continued fraction that is it, of a number within int32; or 0. */
static double denominator_of(double number) {
    double base = (double)(int64_t)number;
    base -= base > number;
    double rest = number - base, p = 0, q = 1, p_before = 1, q_before = 0;
    while ((base * q + p) / q != number) {
        double inverse = 1 / rest;
        if (!(inverse <= INT32_MAX && q <= INT32_MAX)) { /* the next q is not smaller */
            return 0;
        }
        double digit = (double)(int64_t)inverse, next_p = digit * p + p_before, next_q = digit * q + q_before;
        p_before = p, q_before = q, p = next_p, q = next_q;
        rest = inverse - digit;
    }
    return q <= INT32_MAX ? q : 0;
}

/* The sums of floats of one axis in a block, one by one, at every point. */
static int sum_fractions(const Matrix *source, const char *place, int64_t count, const Point *points, Unit *unit,
                         uint64_t *sums) {
    memset(sums, 0, POINTS * sizeof *sums);
    for (int64_t k = 0; k < count; k++) {
        double number = float_at(place + k * source->column_stride, source->format);
        if (!(number >= -(double)SHIFT && number <= INT32_MAX)) {
            return 0;
        }
        if (!is_over(number, unit->over, number * unit->over + MIDDLE - MIDDLE)) {
            unit->over = denominator_of(number);
            if (!is_over(number, unit->over, number * unit->over + MIDDLE - MIDDLE)) {
                return 0;
            }
            unit->inverse = power((uint64_t)unit->over, PRIME - 2);
        }
        uint64_t value = mul(element((int64_t)(number * unit->over + MIDDLE - MIDDLE)), unit->inverse);
        for (int64_t j = 0; j < POINTS; j++) {
            sums[j] = add(sums[j], mul(value, known_power(&points[j], k)));
        }
    }
    return 1;
}

/* The sums of small ids at every point, the k-th times the k-th power. */
static ALWAYS_INLINE void sum_small(const uint32_t *ids, int64_t count, const Point *points, uint64_t *sums) {
    uint64_t lower[POINTS] = {0}, upper[POINTS] = {0};
    for (int64_t k = 0; k < count; k++) {
        for (int64_t j = 0; j < POINTS; j++) {
            lower[j] += (uint64_t)ids[k] * points[j].lower[k];
            upper[j] += (uint64_t)ids[k] * points[j].upper[k];
        }
    }
    for (int64_t j = 0; j < POINTS; j++) {
        sums[j] = add(fold(lower[j]), mul(fold(upper[j]), (uint64_t)1 << LIMB));
    }
}

/* The sums of the ids of one axis in a block, at every point. */
static ALWAYS_INLINE int sum_block(const Matrix *source, const char *place, int64_t count, const Point *points,
                                   Unit *unit, uint64_t *sums) {
    uint32_t ids[BLOCK], high[BLOCK], any;
    uint64_t inverse = 1;
    if (!load(source, place, 1, count, ids, &any)) {
        if (source->format == 'i' || source->format == 'q') {
            return 0;
        }
        if (!load(source, place, unit->over, count, ids, &any)) {
            return sum_fractions(source, place, count, points, unit, sums);
        }
        inverse = unit->inverse;
    }
    if (any >> SMALL) {
        for (int64_t k = 0; k < count; k++) {
            ids[k] ^= (uint32_t)SHIFT;
            high[k] = ids[k] >> HALF;
            ids[k] &= (1 << HALF) - 1;
        }
    }
    sum_small(ids, count, points, sums);
    if (any >> SMALL) {
        uint64_t more[POINTS];
        sum_small(high, count, points, more);
        for (int64_t j = 0; j < POINTS; j++) {
            sums[j] = add(sums[j], mul(more[j], 1 << HALF));
            sums[j] = add(sums[j], mul(PRIME - SHIFT, points[j].ones[count]));
        }
    }
    for (int64_t j = 0; j < POINTS; j++) {
        sums[j] = mul(sums[j], inverse);
    }
    return 1;
}

/* The sums of the ids of one axis in a block, each times its weight at every point. */
static ALWAYS_INLINE int sum_weighted(const Matrix *source, const char *place, int64_t count,
                                      uint64_t weights[POINTS][BLOCK], uint64_t *sums) {
    uint32_t ids[BLOCK], any;
    if (!load(source, place, 1, count, ids, &any)) {
        return 0;
    }
    memset(sums, 0, POINTS * sizeof *sums);
    for (int64_t k = 0; k < count; k++) {
        uint64_t value = element((int32_t)ids[k]);
        for (int64_t j = 0; j < POINTS; j++) {
            sums[j] = add(sums[j], mul(value, weights[j][k]));
        }
    }
    return 1;
}

/* The sums of a run of dense ids at every point. */
static ALWAYS_INLINE int sum_dense(const Matrix *source, const Point *points, const int64_t *run, Over *over,
                                   uint64_t *sums) {
    uint64_t weights[POINTS], divided[POINTS][BLOCK];
    Unit units[MOST_AXES];
    for (int64_t axis = 0; axis < source->rows; axis++) {
        units[axis] = (Unit){256, (uint64_t)1 << 53}; /* 2**61 is 1 */
    }
    for (int64_t j = 0; j < POINTS; j++) {
        weights[j] = power(points[j].point, (uint64_t)run[INDEX]);
        sums[j] = 0;
    }
    for (int64_t done = 0, count; done < run[TOKENS]; done += count) {
        const int64_t column = run[FIRST] + done, most = run[TOKENS] - done < BLOCK ? run[TOKENS] - done : BLOCK;
        const int64_t mixed = mixed_columns(over, column, most);
        uint64_t values[POINTS] = {0}, each[POINTS], inverse = mixed ? 1 : inverse_at(over, column);
        count = mixed ? mixed : equal_columns(over, column, most);
        if (inverse == 0 || (mixed && !divide_powers(over, column, count, points, divided))) {
            return 0;
        }
        for (int64_t axis = 0; axis < source->rows; axis++) {
            const char *place = source->data + axis * source->row_stride + column * source->column_stride;
            if (!(mixed ? sum_weighted(source, place, count, divided, each)
                        : sum_block(source, place, count, points, &units[axis], each))) {
                return 0;
            }
            for (int64_t j = 0; j < POINTS; j++) {
                values[j] = add(values[j], mul(points[j].factors[axis], each[j]));
            }
        }
        for (int64_t j = 0; j < POINTS; j++) {
            uint64_t shift = mul(points[j].factors[source->rows], points[j].ones[count]);
            sums[j] = add(sums[j], mul(weights[j], add(mul(values[j], inverse), shift)));
            weights[j] = mul(weights[j], count < BLOCK ? known_power(&points[j], count) : points[j].after);
        }
    }
    return 1;
}

static int sum_ids(const Matrix *source, const Point *points, const int64_t *run, Over *over, uint64_t *sums) {
    return sum_dense(source, points, run, over, sums);
}

static WIDE int sum_ids_wide(const Matrix *source, const Point *points, const int64_t *run, Over *over,
                             uint64_t *sums) {
    return sum_dense(source, points, run, over, sums);
}

/* The sum of a segment of a table at a point: at most a part of a row, rows, frames, rows and a part of a row. */
static int segment_at(const Matrix *table, const Point *point, const int64_t *run, uint64_t inverse, uint64_t *result) {
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
        terms[term] = mul(terms[term], inverse);
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

static int sum_segment(const Matrix *table, const Point *points, const int64_t *run, Over *over, uint64_t *sums) {
    const uint64_t inverse = inverse_at(over, run[FIRST]);
    return inverse != 0 && segment_at(table, &points[0], run, inverse, &sums[0]) &&
           segment_at(table, &points[1], run, inverse, &sums[1]);
}

typedef int Sum(const Matrix *source, const Point *points, const int64_t *run, Over *over, uint64_t *sums);

static int sum_runs(const Matrix *source, Sum *sum, const Matrix *runs, Over *over, const Point *points,
                    const Matrix *out) {
    for (int64_t r = 0; r < runs->columns; r++) {
        int64_t run[RUN_ROWS], room = sum == sum_segment ? 1 : entry(runs, TOKENS, r);
        for (int64_t i = 0; i < RUN_ROWS; i++) {
            run[i] = entry(runs, i, r);
        }
        if (run[FIRST] < 0 || run[TOKENS] < 0 || run[TOKENS] > INT32_MAX + (int64_t)1 || room > source->columns ||
            run[FIRST] > source->columns - room || run[OWNER] < 0 || run[OWNER] >= out->rows || run[INDEX] < 0) {
            return 0;
        }
        uint64_t sums[POINTS];
        if (!sum(source, points, run, over, sums)) {
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
        Point *point = &points[j];
        uint64_t power = 1;
        point->ones[0] = 0;
        for (int64_t k = 0; k < BLOCK; k++) {
            power = element(entry(powers, j, k));
            point->ones[k + 1] = add(point->ones[k], power);
            point->lower[k] = power & (((uint32_t)1 << LIMB) - 1);
            point->upper[k] = (uint32_t)(power >> LIMB);
        }
        for (int64_t k = 0; k < factors->columns; k++) {
            point->factors[k] = element(entry(factors, j, k));
        }
        point->point = element(entry(powers, j, 1));
        point->after = mul(power, point->point);
    }
}
#endif

/* sums(source, placed, runs, over, powers, factors, out, wide) -> bool, whether the sum of every run was added to that of its
 * document.
 *
 * source: (axes, tokens) ids within int32, as int32, int64, float32 or float64, or where placed the columns of a table,
 * whose offset and denominator are not read; runs: (4, runs) int64 first token, or the column, tokens, document, and
 * index of the first token in its document; over: (tokens,) or (columns,) int64 denominators of ids, or None; powers: (2, 256) int64 of both points; factors:
 * (2, axes + 1) int64; out: (documents, 2) int64; wide: by the widest vectors of the CPU instead of those that all
 * have. If False, out holds anything. */
PyObject *native_sums(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Buffers buffers;
    Matrix source, runs, powers, factors, out;
    Over over = {0};
    int done = 0;
    (void)self;
    if (!arguments("sums", 8, count)) {
        return NULL;
    }
    buffers.count = 0;
#ifdef __SIZEOF_INT128__
    const int placed = args[1] == Py_True;
    over.given = args[3] != Py_None;
    if (take_matrix(&buffers, args[0], 0, &source) && take_matrix(&buffers, args[2], 0, &runs) &&
        (!over.given || take_vector(&buffers, args[3], 'q', 0, &over.each)) &&
        take_matrix(&buffers, args[4], 0, &powers) && take_matrix(&buffers, args[5], 0, &factors) &&
        take_matrix(&buffers, args[6], PyBUF_WRITABLE, &out)) {
        int64_t axes = placed ? (source.rows - AXES) / 4 : source.rows;
        Point points[POINTS];
        int known = source.format == 'i' || source.format == 'f' || source.format == 'd';
        int fits = (source.format == 'q' || (known && !placed)) && axes >= 1 && axes <= MOST_AXES &&
                   is_block(&runs, RUN_ROWS) && is_block(&powers, POINTS) && powers.columns == BLOCK &&
                   is_block(&factors, POINTS) && factors.columns == axes + 1 && out.format == 'q' &&
                   out.columns == POINTS && (!over.given || over.each.size == source.columns);
        if (fits) {
            Sum *sum = placed ? sum_segment : args[7] == Py_True && has_wide() ? sum_ids_wide : sum_ids;
            fill_points(&powers, &factors, points);
            Py_BEGIN_ALLOW_THREADS
                done = sum_runs(&source, sum, &runs, &over, points, &out);
            Py_END_ALLOW_THREADS
        }
    }
#endif
    release(&buffers);
    return PyBool_FromLong(done);
}
