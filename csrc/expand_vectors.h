/* Write the ids of a table in every element type, with vectors of one width. expand.c includes this file once per
 * width, with
 *
 *   V       bytes per vector
 *   TARGET  attribute of functions that use these vectors
 *   W(x)    name of x for this width */

#define T uint32_t
#define NAME(x) W(x##_int32)
#define OUT(x) (x)
#include "expand_rows.h"

#define T uint64_t
#define NAME(x) W(x##_int64)
#define OUT(x) (x)
#include "expand_rows.h"

#define T double
#define NAME(x) W(x##_whole)
#define OUT(x) (x)
#include "expand_rows.h"

#define T double
#define NAME(x) W(x##_product)
#define OUT(x) ((x) * unit)
#include "expand_rows.h"

#define T double
#define NAME(x) W(x##_quotient)
#define OUT(x) ((x) / unit)
#include "expand_rows.h"

/* Write the ids of a segment on one axis in the format of the output. */
static TARGET inline void W(put_ids)(char *out, char format, const Segment *s, const int64_t *steps,
                                     int64_t denominator) {
    if (format == 'i') {
        W(segment_int32)(out, s, steps, 1);
    } else if (format == 'q') {
        W(segment_int64)(out, s, steps, 1);
    } else if (denominator == 1) {
        W(segment_whole)(out, s, steps, 1);
    } else if ((denominator & (denominator - 1)) == 0) { /* halves and quarters: a product is as exact and faster */
        W(segment_product)(out, s, steps, 1 / (double)denominator);
    } else {
        W(segment_quotient)(out, s, steps, (double)denominator);
    }
}

/* Fill out row by row; return 0 if the table is malformed or a numerator is not exact as a double. */
static TARGET int W(expand)(const Matrix *table, int64_t num_tokens, const Matrix *out, const uint8_t *axes) {
    int64_t begin = 0;
    for (int64_t column = 0; column < table->columns; column++) {
        int64_t stop = column + 1 < table->columns ? entry(table, OFFSET, column + 1) : num_tokens;
        int64_t denominator = entry(table, DENOMINATOR, column);
        if (stop < begin || stop > num_tokens) {
            return 0;
        }
        Segment found = {stop - begin, entry(table, SKIP, column), entry(table, HEIGHT, column),
                         entry(table, WIDTH, column)};
        if (found.skip < 0 || found.skip > INT64_MAX - found.tokens || found.height < 1 || found.width < 1 ||
            denominator < 1) {
            return 0;
        }
        for (int64_t row = 0; row < out->rows; row++) {
            int64_t steps[4];
            for (int64_t i = 0; i < 4; i++) {
                steps[i] = entry(table, AXES + 4 * axes[row] + i, column);
            }
            if (out->format == 'd' && !exact(&found, steps)) {
                return 0;
            }
            Segment segment = stretched(found, steps);
            char *target = out->data + row * out->row_stride + begin * out->itemsize;
            W(put_ids)(target, out->format, &segment, steps, denominator);
        }
        begin = stop;
    }
    return begin == num_tokens;
}

#undef V
#undef TARGET
#undef W
