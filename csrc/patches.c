/* Cut pixels into patches, either unchanged or with each level looked up in a table that Python computed. */

#include "native.h"

#ifdef __SSE2__ /* always on x86-64 */
#include <emmintrin.h>
#endif

enum { LARGEST = 32 };                              /* largest side of a float patch that still fits the L1 cache */
enum { STREAMED = 1 << 22 };                        /* output of at least this many bytes bypasses the caches */
enum { COLOURS = 3, LEVELS = 256, MOST = 1 << 20 }; /* MOST: limit of the block side and of frames */

/* Source and destination of patches. The patches of a block are consecutive in `out`; `block` is 1 for raster order. */
typedef struct {
    const char *pixels;
    int64_t height, width, row_stride; /* size and stride of pixels; a row is contiguous */
    int64_t patch, block, frames;      /* frames: copies of each plane; 0 leaves patches unchanged */
    const float *levels;               /* (COLOURS, LEVELS), or NULL to copy bytes */
    char *out;
    int stream; /* whether output bypasses the caches */
} Cut;

/* A function that writes the patch at these pixels and returns the address of the next patch. */
typedef char *Write(const Cut *cut, const char *pixels, char *out, int64_t patch);

/* Copy bytes. For a few dozen bytes, calling memcpy costs more than the copy itself. */
static ALWAYS_INLINE char *write_bytes(const Cut *cut, const char *pixels, char *out, int64_t patch) {
    const int64_t row = patch * COLOURS;
    for (int64_t y = 0; y < patch; y++, pixels += cut->row_stride, out += row) {
        int64_t i = 0;
        for (; i + 16 <= row; i += 16) {
            memcpy(out + i, pixels + i, 16);
        }
        if (row >= 16) { /* end of the row, overlapping earlier bytes */
            memcpy(out + row - 16, pixels + row - 16, 16);
        } else {
            memcpy(out, pixels, (size_t)row);
        }
    }
    return out;
}

/* Copy values from the cache to the output, bypassing the caches if the output would not fit in them. */
static ALWAYS_INLINE char *hand_over(const Cut *cut, char *out, const float *values, int64_t size) {
    int64_t i = 0;
#ifdef __SSE2__
    for (; cut->stream && i + 16 <= size; i += 16) {
        _mm_stream_ps((float *)(void *)(out + i), _mm_loadu_ps(values + i / 4));
    }
#else
    (void)cut; /* no streaming stores here */
#endif
    memcpy(out + i, (const char *)values + i, (size_t)(size - i));
    return out + size;
}

/* Write a patch as floats, either in pixel order or as one plane per colour and frame. */
static ALWAYS_INLINE char *write_floats(const Cut *cut, const char *pixels, char *out, int64_t patch, int planes) {
    const int64_t area = patch * patch, right = planes ? 1 : COLOURS, deep = planes ? area : 1;
    const float *red = cut->levels, *green = red + LEVELS, *blue = green + LEVELS;
    float values[COLOURS * LARGEST * LARGEST];
    float *value = values;
    for (int64_t y = 0; y < patch; y++, pixels += cut->row_stride) {
        const unsigned char *pixel = (const unsigned char *)pixels;
        for (int64_t x = 0; x < patch; x++, pixel += COLOURS, value += right) {
            value[0] = red[pixel[0]];
            value[deep] = green[pixel[1]];
            value[2 * deep] = blue[pixel[2]];
        }
    }
    if (!planes) {
        return hand_over(cut, out, values, COLOURS * area * (int64_t)sizeof(float));
    }
    for (int64_t colour = 0; colour < COLOURS; colour++) {
        for (int64_t frame = 0; frame < cut->frames; frame++) {
            out = hand_over(cut, out, values + colour * area, area * (int64_t)sizeof(float));
        }
    }
    return out;
}

static ALWAYS_INLINE char *write_pixels(const Cut *cut, const char *pixels, char *out, int64_t patch) {
    return write_floats(cut, pixels, out, patch, 0);
}

static ALWAYS_INLINE char *write_planes(const Cut *cut, const char *pixels, char *out, int64_t patch) {
    return write_floats(cut, pixels, out, patch, 1);
}

/* Write all patches in order. This is inlined for each Write and each common patch side, which is then a constant. */
static ALWAYS_INLINE void all_patches(const Cut *cut, Write *write, int64_t patch) {
    const int64_t side = cut->block * patch;
    char *out = cut->out;
    for (int64_t top = 0; top < cut->height; top += side) {
        for (int64_t left = 0; left < cut->width; left += side) {
            for (int64_t y = top; y < top + side; y += patch) {
                for (int64_t x = left; x < left + side; x += patch) {
                    out = write(cut, cut->pixels + y * cut->row_stride + x * COLOURS, out, patch);
                }
            }
        }
    }
}

static void cut_as_told(const Cut *cut) {
#define SIDES(write)                             \
    switch (cut->patch) {                        \
        case 14:                                 \
            all_patches(cut, write, 14);         \
            return;                              \
        case 16:                                 \
            all_patches(cut, write, 16);         \
            return;                              \
        default:                                 \
            all_patches(cut, write, cut->patch); \
            return;                              \
    }
    if (cut->levels == NULL) {
        SIDES(write_bytes)
    } else if (cut->frames == 0) {
        SIDES(write_pixels)
    } else {
        SIDES(write_planes)
    }
#undef SIDES
}

static void run(const Cut *cut) {
    cut_as_told(cut);
#ifdef __SSE2__
    if (cut->stream) {
        _mm_sfence(); /* so that other threads see the streamed data */
    }
#endif
}

/* Get pixels (h, w, 3) that have contiguous rows and divide into whole blocks; return 0 for any other object. */
static int take_pixels(Buffers *buffers, PyObject *object, Cut *cut) {
    const int64_t side = cut->patch * cut->block;
    const Py_buffer *buffer = take_buffer(buffers, object, 3, 0);
    if (buffer == NULL || format_of(buffer) != 'B' || buffer->shape[2] != COLOURS || buffer->strides[2] != 1 ||
        buffer->strides[1] != COLOURS || buffer->shape[0] > INT32_MAX || buffer->shape[1] > INT32_MAX) {
        return 0;
    }
    cut->pixels = buffer->buf;
    cut->height = buffer->shape[0];
    cut->width = buffer->shape[1];
    cut->row_stride = buffer->strides[0];
    return cut->height % side == 0 && cut->width % side == 0;
}

/* Get the table of levels for float patches; return 0 for any other object, or if patches are too large. */
static int take_levels(Buffers *buffers, PyObject *object, Cut *cut) {
    if (object == Py_None) {
        return cut->frames == 0;
    }
    const Py_buffer *buffer = cut->patch <= LARGEST ? take_flat(buffers, object, 'f', 0) : NULL;
    if (buffer == NULL || buffer->len != (Py_ssize_t)(sizeof(float) * COLOURS * LEVELS)) {
        return 0;
    }
    cut->levels = buffer->buf;
    return 1;
}

/* Return whether the pixels fill an output with this number of elements; no product here exceeds 53 bits. */
static int fills(const Cut *cut, int64_t elements) {
    const int64_t row = cut->width * COLOURS * (cut->frames > 0 ? cut->frames : 1);
    return row == 0 || cut->height == 0 ? elements == 0 : elements % row == 0 && elements / row == cut->height;
}

/* Read a number from `least` to MOST; return 0, with no exception set, for any other object. */
static int take_number(PyObject *object, int64_t *number, int64_t least) {
    *number = PyLong_Check(object) ? PyLong_AsLongLong(object) : -1;
    PyErr_Clear();
    return *number >= least && *number <= MOST;
}

/* patches(pixels, patch, block, levels, frames, out) -> bool: True if out was filled.
 *
 * pixels: (h, w, 3) uint8 with any row stride; levels: 3·256 float32, or None for uint8 patches; frames: 0 for patches
 * (n, patch, patch, 3), else the number of frames in planes (n, 3, frames, patch, patch) of floats; out: contiguous, of
 * any shape. */
PyObject *native_patches(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Buffers buffers;
    Cut cut = {0};
    const Py_buffer *out = NULL;
    (void)self;
    if (!arguments("patches", 6, count)) {
        return NULL;
    }
    buffers.count = 0;
    if (take_number(args[1], &cut.patch, 1) && take_number(args[2], &cut.block, 1) &&
        take_number(args[4], &cut.frames, 0) && take_pixels(&buffers, args[0], &cut) &&
        take_levels(&buffers, args[3], &cut)) {
        out = take_flat(&buffers, args[5], cut.levels == NULL ? 'B' : 'f', PyBUF_WRITABLE);
    }
    int fits = out != NULL && fills(&cut, out->len / out->itemsize);
    if (fits) {
        cut.out = out->buf;
        cut.stream = out->len >= STREAMED && (uintptr_t)out->buf % 16 == 0 && cut.patch * cut.patch * COLOURS % 4 == 0;
        if (out->len < RELEASE_GIL_BYTES) {
            run(&cut);
        } else {
            Py_BEGIN_ALLOW_THREADS
                run(&cut);
            Py_END_ALLOW_THREADS
        }
    }
    release(&buffers);
    return PyBool_FromLong(fits);
}
