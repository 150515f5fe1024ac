/* The chunks of image files that a reader of headers needs, found as in mmpos/images/headers.py. */

#include <stdlib.h>

#include "native.h"

enum { JPEG, PNG, GIF, WEBP };           /* the formats */
enum { WHOLE, SHORT, CROWDED, CORRUPT }; /* how a walk ends */

enum { END = 0xD9, SCAN = 0xDA, APP1 = 0xE1 }; /* markers of a JPEG */

typedef struct {
    const uint8_t *data;
    int64_t size, steps, most; /* parts that were looked at, and that may be */
    int64_t *parts;            /* kind, start and length of each that matters */
    int64_t count, room;
    int memory; /* whether there was enough */
} Walk;

/* Keep a part; there are at most as many as steps. */
static void keep(Walk *walk, int64_t kind, int64_t start, int64_t length) {
    if (walk->count == walk->room) {
        int64_t room = 2 * walk->room + 32;
        int64_t *parts = realloc(walk->parts, (size_t)room * 3 * sizeof *parts);
        if (parts == NULL) {
            walk->memory = 0;
            return;
        }
        walk->parts = parts;
        walk->room = room;
    }
    int64_t part[3] = {kind, start, length};
    memcpy(walk->parts + 3 * walk->count++, part, sizeof part);
}

static int64_t big_endian(const uint8_t *at, int bytes) {
    int64_t value = 0;
    for (int i = 0; i < bytes; i++) {
        value = value << 8 | at[i];
    }
    return value;
}

static int has(const Walk *walk, int64_t start, int64_t bytes) {
    return start <= walk->size && walk->size - start >= bytes;
}

static int begins(const Walk *walk, int64_t start, const char *text, int64_t bytes) {
    return has(walk, start, bytes) && memcmp(walk->data + start, text, (size_t)bytes) == 0;
}

/* Where the byte after the next marker is that has a length or ends the file; -1 if there is none. */
static int64_t next_marker(const Walk *walk, int64_t position) {
    while (has(walk, position, 2)) {
        const uint8_t *found = memchr(walk->data + position, 0xFF, (size_t)(walk->size - 1 - position));
        if (found == NULL) {
            return -1;
        }
        position = found - walk->data + 1;
        while (walk->data[position] == 0xFF && has(walk, position, 2)) {
            position++; /* padding */
        }
        uint8_t marker = walk->data[position];
        if (marker > 0x01 && marker != 0xFF && (marker < 0xD0 || marker > 0xD8)) {
            return position + 1;
        }
    }
    return -1;
}

static int is_frame(int64_t marker) {
    return marker >= 0xC0 && marker <= 0xCF && marker != 0xC4 && marker != 0xC8 && marker != 0xCC;
}

static int is_note(int64_t marker) { return (marker > 0xE0 && marker < 0xF0 && marker != 0xEE) || marker == 0xFE; }

static int walk_jpeg(Walk *walk) {
    int64_t position = 2, components = -1;
    int several = 0, scanning = 0, upright = 1;
    while ((position = next_marker(walk, position)) > 0) {
        int64_t marker = walk->data[position - 1], start = position + 2;
        if (++walk->steps > walk->most) {
            return CROWDED;
        }
        if (marker == END) {
            return scanning ? WHOLE : CORRUPT;
        }
        if (!has(walk, position, 2)) {
            return SHORT;
        }
        int64_t length = big_endian(walk->data + position, 2) - 2;
        if (length < 0) {
            return CORRUPT;
        }
        position = start + length;
        if (marker == SCAN) {
            keep(walk, marker, start, length);
            if (!has(walk, start, 1)) {
                return SHORT;
            }
            if (!several && !scanning && walk->data[start] >= components) {
                return WHOLE;
            }
            scanning = 1;
        } else if (scanning) {
            continue;
        } else if (is_frame(marker)) {
            if (!has(walk, start, 6)) {
                return SHORT;
            }
            components = walk->data[start + 5];
            several = (marker & 3) == 2;
            keep(walk, marker, start, length);
        } else if (!is_note(marker)) {
            keep(walk, marker, start, length);
        } else if (marker == APP1 && upright && begins(walk, start, "Exif\0", 6)) {
            keep(walk, marker, start, length);
            upright = 0;
        }
    }
    return SHORT;
}

static int walk_png(Walk *walk) {
    for (int64_t position = 8; has(walk, position, 8);) {
        int64_t length = big_endian(walk->data + position, 4), kind = big_endian(walk->data + position + 4, 4);
        if (++walk->steps > walk->most) {
            return CROWDED;
        }
        int first = begins(walk, position + 4, "IHDR", 4), last = begins(walk, position + 4, "IEND", 4);
        int note = (walk->data[position + 4] & 0x20) && !begins(walk, position + 4, "tRNS", 4) &&
                   !begins(walk, position + 4, "eXIf", 4);
        int corrupt = (position == 8) != first;
        if (corrupt || !note) {
            keep(walk, kind, position + 8, length);
        }
        if (corrupt || last) {
            return corrupt ? CORRUPT : WHOLE;
        }
        position += 12 + length;
    }
    return SHORT;
}

static int walk_gif(Walk *walk) {
    if (!has(walk, 0, 13)) {
        return SHORT;
    }
    int64_t position = 13 + (walk->data[10] & 0x80 ? 3 << ((walk->data[10] & 7) + 1) : 0);
    while (has(walk, position, 1)) {
        int64_t begin = position, kind = walk->data[position], length;
        if (++walk->steps > walk->most) {
            return CROWDED;
        }
        if (kind == ',') {
            keep(walk, kind, position + 1, 8);
            return has(walk, position + 1, 8) ? WHOLE : SHORT;
        }
        if (kind != '!') {
            return CORRUPT;
        }
        position += 2;
        do {
            if (!has(walk, position, 1)) {
                return SHORT;
            }
            if (++walk->steps > walk->most) {
                return CROWDED;
            }
            length = walk->data[position];
            position += 1 + length;
        } while (length);
        if (walk->data[begin + 1] == 0xF9) {
            keep(walk, 0xF9, begin, position - begin);
        }
    }
    return SHORT;
}

static int walk_webp(Walk *walk) {
    int extended = begins(walk, 12, "VP8X", 4);
    for (int64_t position = 12; has(walk, position, 8);) {
        int64_t kind = big_endian(walk->data + position, 4), length = 0;
        for (int i = 7; i > 3; i--) {
            length = length << 8 | walk->data[position + i];
        }
        int exif = begins(walk, position, "EXIF", 4);
        if (++walk->steps > walk->most) {
            return CROWDED;
        }
        if (position == 12 || exif) {
            keep(walk, kind, position + 8, length);
        }
        if (!extended || exif) {
            return WHOLE;
        }
        position += 8 + length + length % 2;
    }
    return SHORT;
}

/* walk(data, format, most) -> (how it ended, bytes of int64 triples) or None.
 *
 * data: the bytes of a file; format: a number, see above; most: parts that may be looked at. The triples are kind,
 * start and length of the parts that matter. */
PyObject *native_walk(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    static int (*const walks[])(Walk *) = {walk_jpeg, walk_png, walk_gif, walk_webp};
    Buffers buffers;
    (void)self;
    if (!arguments("walk", 3, count)) {
        return NULL;
    }
    int64_t format = PyLong_AsLongLong(args[1]), most = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    buffers.count = 0;
    Py_buffer *file = take_flat(&buffers, args[0], 'B', 0);
    if (file == NULL || format < JPEG || format > WEBP) {
        return answer(&buffers, NULL);
    }
    Walk walk = {file->buf, file->len, 0, most, NULL, 0, 0, 1};
    int end;
    Py_BEGIN_ALLOW_THREADS
        end = walks[format](&walk);
    Py_END_ALLOW_THREADS
    PyObject *result = NULL;
    if (walk.memory) { /* y# would need a function that headers of 3.13 do not call */
        result = Py_BuildValue("iN", end, PyBytes_FromStringAndSize((char *)walk.parts, 24 * walk.count));
    } else {
        PyErr_NoMemory();
    }
    free(walk.parts);
    return answer(&buffers, result);
}
