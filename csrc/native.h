/* Shared declarations of the extension. It uses CPython's 3.11 limited API and no numpy headers: arrays are read as
 * buffers.
 *
 * A function declines, with False or None, any argument that the fast path does not support, including wrong ones. The
 * caller then runs the Python implementation, which raises the errors. A function sets an exception only for a wrong
 * call, such as one with the wrong number of arguments, or if memory runs out. Numbers in arrays are not trusted:
 * whatever their values, nothing outside the arrays is read or written. */

#ifndef MMPOS_NATIVE_H
#define MMPOS_NATIVE_H

#include <pyconfig.h>
#ifndef Py_GIL_DISABLED /* the limited API does not exist without the GIL */
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <stdint.h>
#include <string.h>

/* Less work than this finishes before another thread could use the interpreter. */
#define RELEASE_GIL_BYTES (1 << 16)

/* Code for wide vectors, compiled from the same source and used if the CPU supports them. 64-byte vectors are used only
 * on CPUs with avx512vbmi2, because earlier CPUs lower their clock for them. */
#if defined(__GNUC__) && defined(__x86_64__)
#define WIDE __attribute__((target("avx2")))
#define WIDEST __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#define has_wide() __builtin_cpu_supports("avx2")
#define has_widest()                                                                \
    (__builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512bw") && \
     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
#else
#define WIDE
#define WIDEST
#define has_wide() 0
#define has_widest() 0
#endif

enum { SHORT, LONG, LONGEST }; /* vectors of at most 16, 32 or 64 bytes */
#define longest() (has_widest() ? LONGEST : has_wide() ? LONG : SHORT)
#ifdef __GNUC__
#define ALWAYS_INLINE inline __attribute__((always_inline))
#else
#define ALWAYS_INLINE inline
#endif

/* Kinds of segments; see mmpos/segments/kinds.py. */
enum { TEXT, GRID, PAD, AUDIO, CLIP, THUMBNAIL, TILE };

/* Buffers that a function holds and releases together. */
typedef struct {
    int count;
    Py_buffer taken[20];
} Buffers;

/* A one-dimensional buffer with any stride. */
typedef struct {
    char *data;
    int64_t size, stride;
} Vector;

/* A two-dimensional buffer with any strides. */
typedef struct {
    char *data;
    int64_t rows, columns, row_stride, column_stride, itemsize;
    char format; /* format of the elements; see format_of */
} Matrix;

/* 'B' uint8, '?' bool, 'h' int16, 'i' int32, 'q' int64, 'f' float32, 'd' float64, or 0 for anything else. */
char format_of(const Py_buffer *buffer);

/* Get a buffer with this number of dimensions; return NULL, with no exception set, for any other object. */
Py_buffer *take_buffer(Buffers *buffers, PyObject *object, int dimensions, int flags);

/* Get a buffer with one or two dimensions; a vector must have this format. Return 0, with no exception set, for any
 * other object. */
int take_vector(Buffers *buffers, PyObject *object, char format, int flags, Vector *vector);
int take_matrix(Buffers *buffers, PyObject *object, int flags, Matrix *matrix);

/* Get a contiguous buffer with this format and any dimensions; return NULL, with no exception set, for any other
 * object. */
Py_buffer *take_flat(Buffers *buffers, PyObject *object, char format, int flags);
void release(Buffers *buffers);

/* Release the buffers; return the result, or None if there is no result and no exception is set. */
PyObject *answer(Buffers *buffers, PyObject *result);

/* Return whether the number of arguments is right; set a TypeError otherwise. */
int arguments(const char *name, Py_ssize_t wanted, Py_ssize_t got);

static inline int64_t int64_at(const char *place) {
    int64_t value;
    memcpy(&value, place, 8);
    return value;
}

static inline void put_int64(char *place, int64_t value) { memcpy(place, &value, 8); }

/* Elements of int64 vectors and matrices. */
static inline int64_t item(const Vector *vector, int64_t i) { return int64_at(vector->data + i * vector->stride); }

static inline void put(const Vector *vector, int64_t i, int64_t value) {
    put_int64(vector->data + i * vector->stride, value);
}

static inline int64_t entry(const Matrix *matrix, int64_t row, int64_t column) {
    return int64_at(matrix->data + row * matrix->row_stride + column * matrix->column_stride);
}

static inline void put_entry(const Matrix *matrix, int64_t row, int64_t column, int64_t value) {
    put_int64(matrix->data + row * matrix->row_stride + column * matrix->column_stride, value);
}

/* Sums and differences that wrap around, as in numpy. */
static inline int64_t plus(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); }

static inline int64_t minus(int64_t a, int64_t b) { return (int64_t)((uint64_t)a - (uint64_t)b); }

/* Return the number of tokens of a segment; 0 if it has no tokens or more than allowed. */
static inline int64_t tokens_of(int64_t frames, int64_t height, int64_t width, int64_t separator) {
    if (frames < 1 || height < 1 || width < 1 || frames > INT32_MAX || height > INT32_MAX || width > INT32_MAX) {
        return 0;
    }
    int64_t tall = frames * height; /* at most 2**62 */
    if (tall > INT32_MAX) {
        return 0;
    }
    int64_t tokens = tall * (width + separator); /* cannot overflow */
    return tokens > INT32_MAX ? 0 : tokens;
}

/* Return the length of a list or tuple; -1 for other objects and for subclasses, which may iterate differently. */
Py_ssize_t length_of(PyObject *list);

PyObject *native_collate(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_concatenate(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_cut(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_documents(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_enter(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_expand(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_integers(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_joined(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_mask(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_numbers(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_place(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_placed(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_rotate(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_scan(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_segments(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_served(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_sound(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_spans(PyObject *self, PyObject *const *args, Py_ssize_t count);

#endif
