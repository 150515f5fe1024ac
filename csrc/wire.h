/* Numbers and fields in protobuf's wire format. */

#ifndef MMPOS_WIRE_H
#define MMPOS_WIRE_H

#include "native.h"

enum { VARINT, FIXED64, BYTES, FIXED32 = 5 }; /* wire types, except those of groups */

typedef struct {
    const uint8_t *begin, *end; /* NULL until found */
} Span;

/* Read a varint of at most `most` bytes; return NULL if there is none. */
static inline const uint8_t *varint(const uint8_t *at, const uint8_t *end, int most, uint64_t *value) {
    *value = 0;
    for (int i = 0; i < most && at < end; i++) {
        uint8_t byte = *at++;
        *value |= (uint64_t)(byte & 0x7f) << (7 * i); /* the excess bits of a tenth byte are dropped, as in protobuf */
        if (byte < 0x80) {
            return at;
        }
    }
    return NULL;
}

/* Return the number of packed varints in these bytes; -1 if they are malformed. */
static inline int64_t varints(const uint8_t *at, const uint8_t *end) {
    int64_t count = 0;
    int length = 0;
    for (; at < end; at++) {
        length++;
        if (*at < 0x80) {
            count++;
            length = 0;
        } else if (length == 10) {
            return -1;
        }
    }
    return length == 0 ? count : -1;
}

/* Write the varints of a span as int64. */
static inline void unpack(const Span *span, char *out) {
    for (const uint8_t *at = span->begin; at < span->end; out += 8) {
        uint64_t value = *at++;
        if (value >= 0x80) {
            at = varint(at - 1, span->end, 10, &value);
        }
        put_int64(out, (int64_t)value);
    }
}

#endif
