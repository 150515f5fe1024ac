/* Find the segments of token ids in one pass over tokens, mask and grids. Models differ only in data: the placeholder
 * tokens of patches and audio, the tokens that end rows or surround crops, and how grids are merged.
 * For input that is declined here, SegmentTable.from_input_ids raises the errors. */

#include <stdlib.h>

#include "native.h"

#define BLOCK 64 /* ids compared as a block before they are compared one by one */

#define T int32_t
#define NAME(x) x##_narrow
#include "placeholders_scan.h"

#define T int64_t
#define NAME(x) x##_wide
#include "placeholders_scan.h"

#define T uint8_t
#define NAME(x) x##_byte
#include "placeholders_scan.h"

/* Tokens, in the order of Placeholders.tokens; ABSENT if the model lacks one. */
enum {
    IMAGE,
    VIDEO,
    SOUND,
    ROW_END,
    LAST_ROW_END,
    THUMBNAIL_START,
    THUMBNAIL_END,
    TILE_START,
    TILE_END,
    NEWLINE,
    TOKENS
};

/* Options, in the order of `merging`; see mmpos/segments/placeholders.py. */
enum { MERGED_FRAMES, MERGED_SIDES, FRAMES_APART, LENIENT, TYPES, OPTIONS };

#define ABSENT INT64_MIN
#define MARKERS 2 /* before and after a clip */

typedef struct {
    int64_t kind, frames, height, width, extra, video;
} Segment;

/* Grids of images or videos; the next grid to read, or its next frame. */
typedef struct {
    Matrix thw;
    int64_t count, next, frame;
} Grids;

typedef struct {
    const char *data;
    int64_t size, itemsize;
} Ids;

typedef struct {
    Ids ids;
    int64_t token[TOKENS], option[OPTIONS], searched[3];
    int num_searched, framed;
    Grids grids[2]; /* images, videos */
    const Vector *audio_lengths;
    int64_t audios;
    Segment *segments;
    int64_t num_segments, room;
    int64_t first, start, stop, at; /* a document's first segment, first token, end, and next token without a segment */
} Scan;

static int64_t id_at(const Ids *ids, int64_t i) {
    return ids->itemsize == 8   ? at_wide(ids->data, i)
           : ids->itemsize == 4 ? at_narrow(ids->data, i)
                                : at_byte(ids->data, i);
}

/* Return the index of the first searched token from i on, else the end of the document. */
static int64_t next_of(const Scan *scan, int64_t i) {
    const char *ids = scan->ids.data;
    int count = scan->num_searched;
    return scan->ids.itemsize == 8   ? next_wide(ids, i, scan->stop, scan->searched, count)
           : scan->ids.itemsize == 4 ? next_narrow(ids, i, scan->stop, scan->searched, count)
                                     : next_byte(ids, i, scan->stop, scan->searched, count);
}

/* Return the index of the first element from i on that differs from `token`, else stop. */
static int64_t end_of(const Ids *ids, int64_t i, int64_t stop, int64_t token) {
    return ids->itemsize == 8   ? other_wide(ids->data, i, stop, token)
           : ids->itemsize == 4 ? other_narrow(ids->data, i, stop, (int32_t)token)
                                : other_byte(ids->data, i, stop, (uint8_t)token);
}

static int are_types(const Scan *scan) {
    const char *ids = scan->ids.data;
    return scan->ids.itemsize == 8   ? types_wide(ids, scan->start, scan->stop)
           : scan->ids.itemsize == 4 ? types_narrow(ids, scan->start, scan->stop)
                                     : types_byte(ids, scan->start, scan->stop);
}

/* Append a segment; return 0 if memory runs out. */
static int add_segment(Scan *scan, Segment segment) {
    if (scan->num_segments == scan->room) {
        int64_t room = 2 * scan->room + 64;
        Segment *segments = realloc(scan->segments, (size_t)room * sizeof *segments);
        if (segments == NULL) {
            return 0;
        }
        scan->segments = segments;
        scan->room = room;
    }
    scan->segments[scan->num_segments++] = segment;
    return 1;
}

static int add_run(Scan *scan, int64_t kind, int64_t tokens) {
    Segment run = {kind, 1, 1, tokens, 0, -1};
    return tokens <= 0 || add_segment(scan, run);
}

/* Add a segment and the text before it; return 0 if it overlaps the previous one. */
static int add_span(Scan *scan, int64_t first, int64_t stop, Segment segment) {
    int64_t text = first - scan->at;
    scan->at = stop;
    return text >= 0 && add_run(scan, TEXT, text) && add_segment(scan, segment);
}

/* Get the next grid of images or videos; return its number of tokens, or 0 if no grid fits. */
static int64_t next_grid(Scan *scan, int kind, Segment *segment) {
    Grids *grids = &scan->grids[kind];
    int64_t apart = kind == VIDEO && scan->option[FRAMES_APART], lenient = scan->option[LENIENT];
    while (apart && lenient && grids->next < grids->count && entry(&grids->thw, grids->next, 0) == 0) {
        grids->next++;
    }
    if (grids->next >= grids->count) {
        return 0;
    }
    int64_t frames = entry(&grids->thw, grids->next, 0), height = entry(&grids->thw, grids->next, 1);
    int64_t width = entry(&grids->thw, grids->next, 2), merge = scan->option[MERGED_SIDES];
    int64_t merged_frames = kind == VIDEO || scan->option[MERGED_FRAMES] == 0 ? scan->option[MERGED_FRAMES] : 1;
    if (frames < 0 || frames > INT32_MAX || height < 1 || width < 1 ||
        (!lenient && (height % merge != 0 || width % merge != 0))) {
        return 0;
    }
    frames = merged_frames > 0 ? frames / merged_frames : 1;
    Segment grid = {GRID, apart ? 1 : frames, height / merge, width / merge, 0, kind == VIDEO ? grids->next : -1};
    *segment = grid;
    if (!apart || ++grids->frame >= frames) {
        grids->next++;
        grids->frame = 0;
    }
    int64_t tokens = frames < 1 ? 0 : tokens_of(grid.frames, grid.height, grid.width, scan->token[ROW_END] != ABSENT);
    return tokens;
}

/* The functions below add the segment that begins at token i and return the index of the token after it, or -1 to
 * decline. */

static int64_t put_grids(Scan *scan, int kind, int64_t i, int64_t stop) {
    while (i < stop) {
        Segment grid;
        int64_t tokens = next_grid(scan, kind, &grid);
        if (tokens == 0 || tokens > stop - i || !add_span(scan, i, i + tokens, grid)) {
            return -1;
        }
        i += tokens;
    }
    return i;
}

/* Add a grid whose rows end with separators. */
static int64_t put_rows(Scan *scan, int64_t i, int64_t tokens, Segment grid) {
    int64_t token = id_at(&scan->ids, i), rows = grid.frames * grid.height, at = i;
    for (int64_t row = 0; row < rows; row++) {
        int64_t end = at + grid.width;
        if (end_of(&scan->ids, at, end, token) != end ||
            id_at(&scan->ids, end) != scan->token[row + 1 == rows ? LAST_ROW_END : ROW_END]) {
            return -1;
        }
        at = end + 1;
    }
    return add_span(scan, i, i + tokens, grid) ? at : -1;
}

/* Add a grid whose rows end with an extra placeholder, or all frames of a video that are separate grids of this kind;
 * their run may have an extra placeholder at each end. */
static int64_t put_framed(Scan *scan, int kind, int64_t i, int64_t tokens, Segment grid) {
    int apart = kind == VIDEO && scan->option[FRAMES_APART];
    int64_t frames = apart ? entry(&scan->grids[VIDEO].thw, grid.video, 0) : 1;
    int64_t end = end_of(&scan->ids, i, scan->stop, id_at(&scan->ids, i)), around = end - i - frames * tokens;
    if (around != 0 && around != 2) {
        return -1;
    }
    for (i += around / 2; add_span(scan, i, i + tokens, grid); next_grid(scan, kind, &grid), i += tokens) {
        if (--frames == 0) {
            return end;
        }
    }
    return -1;
}

static int is_marker(const Scan *scan, int64_t i) {
    int64_t id = id_at(&scan->ids, i), found = 0;
    for (int j = THUMBNAIL_START; j <= NEWLINE; j++) {
        found |= id == scan->token[j];
    }
    return found != 0;
}

/* Add a thumbnail or a tile: a grid between its markers, including all following markers that do not open the next
 * grid. */
static int64_t put_crop(Scan *scan, int64_t i, int64_t tokens, Segment grid) {
    int64_t end = i + tokens, last = end + 1;
    if (i <= scan->start || end >= scan->stop || grid.frames != 1) {
        return -1;
    }
    int64_t before = id_at(&scan->ids, i - 1), tile = before == scan->token[TILE_START];
    if ((!tile && before != scan->token[THUMBNAIL_START]) ||
        id_at(&scan->ids, end) != scan->token[tile ? TILE_END : THUMBNAIL_END]) {
        return -1;
    }
    int64_t id;
    while (last < scan->stop && is_marker(scan, last)) {
        last++;
    }
    id = last < scan->stop ? id_at(&scan->ids, last) : ABSENT;
    last -= id != ABSENT && (id == scan->token[IMAGE] || id == scan->token[VIDEO]);
    int64_t follows = scan->num_segments > scan->first && scan->at == i - 1 &&
                      scan->segments[scan->num_segments - 1].kind >= THUMBNAIL;
    if (last <= end || (tile && !follows)) {
        return -1;
    }
    grid.kind = tile ? TILE : THUMBNAIL;
    grid.extra = last - end - 1;
    return add_span(scan, i - 1, last, grid) ? last : -1;
}

static int heard(Scan *scan, int64_t tokens) {
    const Vector *lengths = scan->audio_lengths;
    int64_t audio = scan->audios++;
    return lengths == NULL || (audio < lengths->size && item(lengths, audio) == tokens);
}

/* Add audio, a video, or both as a clip with markers around it. */
static int64_t put_sound(Scan *scan, int64_t i) {
    int64_t seen = 0, audio = 0, end = i;
    while (end < scan->stop) {
        int64_t id = id_at(&scan->ids, end), from = end;
        if (id == ABSENT || (id != scan->token[VIDEO] && id != scan->token[SOUND])) {
            break;
        }
        end = end_of(&scan->ids, end, scan->stop, id);
        *(id == scan->token[SOUND] ? &audio : &seen) += end - from;
    }
    if (audio == 0) {
        return put_grids(scan, VIDEO, i, end);
    }
    if (!heard(scan, audio)) {
        return -1;
    }
    Segment segment = {AUDIO, 1, 1, audio, 0, -1};
    if (seen == 0) {
        return add_span(scan, i, end, segment) ? end : -1;
    }
    if (next_grid(scan, VIDEO, &segment) != seen || i - MARKERS < scan->start || end + MARKERS > scan->stop) {
        return -1;
    }
    segment.kind = CLIP;
    segment.extra = audio;
    return add_span(scan, i - MARKERS, end + MARKERS, segment) ? end : -1;
}

static int64_t put_next(Scan *scan, int64_t i) {
    int64_t id = id_at(&scan->ids, i);
    int kind = id == scan->token[IMAGE] ? IMAGE : VIDEO;
    if (scan->token[SOUND] != ABSENT && kind != IMAGE) {
        return put_sound(scan, i);
    }
    Segment grid;
    int64_t tokens = next_grid(scan, kind, &grid);
    if (tokens == 0 || tokens > scan->stop - i) {
        return -1;
    }
    if (scan->framed) {
        return put_framed(scan, kind, i, tokens, grid);
    }
    if (scan->token[ROW_END] != ABSENT) {
        return put_rows(scan, i, tokens, grid);
    }
    if (end_of(&scan->ids, i, i + tokens, id) != i + tokens) {
        return -1;
    }
    if (scan->token[THUMBNAIL_START] != ABSENT) {
        return put_crop(scan, i, tokens, grid);
    }
    return add_span(scan, i, i + tokens, grid) ? i + tokens : -1;
}

/* Add the segments of a document with `left` and `right` padding tokens; return 0 if they do not match the tokens. */
static int put_document(Scan *scan, int64_t start, int64_t stop, int64_t left, int64_t right) {
    if (start < 0 || start >= stop || stop > scan->ids.size || stop - start > INT32_MAX || left > INT32_MAX ||
        right > INT32_MAX || !add_run(scan, PAD, left)) {
        return 0;
    }
    scan->first = scan->num_segments;
    scan->start = scan->at = start;
    scan->stop = stop;
    if (scan->option[TYPES] && !are_types(scan)) {
        return 0;
    }
    for (int64_t i = start; (i = next_of(scan, i)) < stop;) {
        i = put_next(scan, i);
        if (i < 0) {
            return 0;
        }
    }
    return scan->at <= stop && add_run(scan, TEXT, stop - scan->at) && add_run(scan, PAD, right);
}

/* Find where the ones in a row of a mask begin and end; return 0 if the row has no ones, a gap, or other numbers. */
static int ones(const Matrix *mask, int64_t row, int64_t *begin, int64_t *end) {
    Ids elements = {mask->data + row * mask->row_stride, mask->columns, mask->itemsize};
    *begin = end_of(&elements, 0, mask->columns, 0);
    *end = end_of(&elements, *begin, mask->columns, 1);
    return *begin < *end && end_of(&elements, *end, mask->columns, 0) == mask->columns;
}

/* Layout of the documents: (batch, seq) with or without a mask, or packed. */
typedef struct {
    int64_t documents, seq;
    const Vector *cu_seqlens; /* NULL if None */
    const Matrix *mask;
} Layout;

/* Add all documents; return 0 if one does not match its tokens or grids. Fill firsts, (documents + 1,), with the first
 * segment of each. */
static int put_documents(Scan *scan, const Layout *layout, char *firsts) {
    const Grids *images = &scan->grids[IMAGE];
    put_int64(firsts, 0);
    for (int64_t d = 0; d < layout->documents; d++) {
        int64_t begin = 0, end = layout->seq, start = d * layout->seq;
        if (layout->cu_seqlens != NULL) {
            start = item(layout->cu_seqlens, d);
            end = minus(item(layout->cu_seqlens, d + 1), start);
        } else if (layout->mask != NULL && !ones(layout->mask, d, &begin, &end)) {
            return 0;
        }
        int64_t padding = layout->cu_seqlens == NULL ? layout->seq - end : 0;
        if (start < 0 || start > scan->ids.size || end > scan->ids.size - start ||
            !put_document(scan, start + begin, start + end, begin, padding)) {
            return 0;
        }
        put_int64(firsts + 8 * (d + 1), scan->num_segments);
    }
    return scan->option[LENIENT] ||
           (images->next == images->count && scan->grids[VIDEO].next == scan->grids[VIDEO].count);
}

/* Return one member of all segments as bytes; itemsize is the size of each value. */
static PyObject *column(const Scan *scan, int from, int members, int itemsize) {
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)itemsize * members * scan->num_segments);
    char *at = bytes == NULL ? NULL : PyBytes_AsString(bytes);
    for (int member = from; bytes != NULL && member < from + members; member++) {
        for (int64_t s = 0; s < scan->num_segments; s++, at += itemsize) {
            const Segment *segment = &scan->segments[s];
            const int64_t values[] = {segment->kind,  segment->frames, segment->height,      segment->width,
                                      segment->extra, segment->video,  segment->kind == GRID};
            if (itemsize == 8) {
                put_int64(at, values[member]);
            } else {
                *at = (char)values[member];
            }
        }
    }
    return bytes;
}

/* Return the arrays of the segments as bytes, or NULL with an exception set. */
static PyObject *arrays_of(const Scan *scan, PyObject *firsts) {
    int grids = 0, extra = 0;
    for (int64_t s = 0; s < scan->num_segments; s++) {
        grids |= scan->segments[s].kind == GRID;
        extra |= scan->segments[s].extra != 0;
    }
    PyObject *parts[] = {column(scan, 0, 1, 1),
                         column(scan, 1, 3, 8),
                         Py_NewRef(firsts),
                         grids && scan->token[ROW_END] != ABSENT ? column(scan, 6, 1, 1) : Py_NewRef(Py_None),
                         extra ? column(scan, 4, 1, 8) : Py_NewRef(Py_None),
                         scan->grids[VIDEO].count > 0 ? column(scan, 5, 1, 8) : Py_NewRef(Py_None)};
    PyObject *result = NULL;
    if (parts[0] != NULL && parts[1] != NULL && parts[3] != NULL && parts[4] != NULL && parts[5] != NULL) {
        result = PyTuple_Pack(6, parts[0], parts[1], parts[2], parts[3], parts[4], parts[5]);
    }
    for (int i = 0; i < 6; i++) {
        Py_XDECREF(parts[i]);
    }
    return result;
}

/* Read a tuple of `count` integers; return 0, with no exception set, for any other object. */
static int take_integers(PyObject *tuple, int count, int64_t *numbers) {
    int fits = PyTuple_Check(tuple) && PyTuple_Size(tuple) == count;
    for (int i = 0; fits && i < count; i++) {
        numbers[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        fits = numbers[i] != -1 || !PyErr_Occurred();
    }
    PyErr_Clear();
    return fits;
}

/* Get contiguous ids of any supported integer type. */
static Py_buffer *take_ids(Buffers *buffers, PyObject *object, Ids *ids) {
    Py_buffer *buffer = NULL;
    for (const char *format = "qiB?"; buffer == NULL && *format; format++) {
        buffer = take_flat(buffers, object, *format, 0);
    }
    if (buffer != NULL) {
        ids->data = buffer->buf;
        ids->itemsize = buffer->itemsize;
        ids->size = buffer->len / buffer->itemsize;
    }
    return buffer != NULL && (buffer->ndim == 1 || buffer->ndim == 2) ? buffer : NULL;
}

static int take_grids(Buffers *buffers, PyObject *object, int64_t token, Grids *grids) {
    if (object == Py_None) {
        return 1;
    }
    int fits = token != ABSENT && take_matrix(buffers, object, 0, &grids->thw) && grids->thw.format == 'q' &&
               grids->thw.columns == 3;
    grids->count = fits ? grids->thw.rows : 0;
    return fits;
}

/* Set the tokens to search for; return 0 for tokens that the type of the ids cannot hold, or for wrong options. */
static int prepare(Scan *scan) {
    for (int i = IMAGE; i <= SOUND; i++) {
        if (scan->token[i] != ABSENT) {
            scan->searched[scan->num_searched++] = scan->token[i];
        }
    }
    for (int i = 0; i < TOKENS; i++) {
        int64_t token = scan->token[i];
        if (token != ABSENT &&
            (scan->ids.itemsize == 1 ? token < 0 || token > 255 : token < INT32_MIN || token > INT32_MAX)) {
            return 0;
        }
    }
    scan->framed = scan->token[ROW_END] != ABSENT &&
                   (scan->token[ROW_END] == scan->token[IMAGE] || scan->token[ROW_END] == scan->token[VIDEO]);
    int special =
        (scan->token[ROW_END] != ABSENT) + (scan->token[SOUND] != ABSENT) + (scan->token[THUMBNAIL_START] != ABSENT);
    return special < 2 && scan->option[MERGED_SIDES] > 0 && scan->option[MERGED_FRAMES] >= 0;
}

static int is_layout(const Layout *layout, const Scan *scan, int dimensions) {
    const Vector *cu = layout->cu_seqlens;
    if (cu != NULL) {
        return layout->mask == NULL && cu->size > 0 && item(cu, 0) == 0 && item(cu, cu->size - 1) == scan->ids.size;
    }
    if (layout->mask != NULL) {
        const Matrix *mask = layout->mask;
        if (dimensions != 2 || mask->rows != layout->documents || mask->columns != layout->seq || mask->format == 0 ||
            strchr("?Biq", mask->format) == NULL || (mask->columns > 1 && mask->column_stride != mask->itemsize)) {
            return 0;
        }
    }
    return layout->seq > 0;
}

/* scan(input_ids, cu_seqlens, attention_mask, tokens, options, image_grid_thw, video_grid_thw, audio_lengths)
 * -> (kind, extents, segment_offsets, row_separator, extra_tokens, video of each segment) as bytes, or None.
 *
 * input_ids: (tokens,) or (batch, seq) int64, int32, uint8 or bool, contiguous; attention_mask: any of these types. All
 * other arrays are int64; each may be None. Each of the last three results is None if no segment has one. */
PyObject *native_scan(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Buffers buffers;
    Scan scan;
    Vector cu_seqlens, audio_lengths;
    Matrix mask;
    PyObject *result = NULL, *firsts = NULL;
    (void)self;
    if (!arguments("scan", 8, count)) {
        return NULL;
    }
    memset(&scan, 0, sizeof scan);
    buffers.count = 0;
    Py_buffer *ids = take_ids(&buffers, args[0], &scan.ids);
    Layout layout = {0, 0, args[1] == Py_None ? NULL : &cu_seqlens, args[2] == Py_None ? NULL : &mask};
    if (ids != NULL && take_integers(args[3], TOKENS, scan.token) && take_integers(args[4], OPTIONS, scan.option) &&
        (layout.cu_seqlens == NULL || take_vector(&buffers, args[1], 'q', 0, &cu_seqlens)) &&
        (layout.mask == NULL || take_matrix(&buffers, args[2], 0, &mask)) &&
        take_grids(&buffers, args[5], scan.token[IMAGE], &scan.grids[IMAGE]) &&
        take_grids(&buffers, args[6], scan.token[VIDEO], &scan.grids[VIDEO]) &&
        (args[7] == Py_None ||
         (scan.token[SOUND] != ABSENT && take_vector(&buffers, args[7], 'q', 0, &audio_lengths)))) {
        scan.audio_lengths = args[7] == Py_None ? NULL : &audio_lengths;
        layout.documents = layout.cu_seqlens != NULL ? cu_seqlens.size - 1 : ids->ndim == 2 ? ids->shape[0] : 1;
        layout.seq = ids->shape[ids->ndim - 1];
        if (prepare(&scan) && is_layout(&layout, &scan, ids->ndim)) {
            firsts = PyBytes_FromStringAndSize(NULL, 8 * (layout.documents + 1));
        }
    }
    if (firsts != NULL) {
        int fits;
        PyThreadState *state = ids->len < RELEASE_GIL_BYTES ? NULL : PyEval_SaveThread();
        fits = put_documents(&scan, &layout, PyBytes_AsString(firsts));
        if (state != NULL) {
            PyEval_RestoreThread(state);
        }
        if (fits && (scan.audio_lengths == NULL || scan.audios == audio_lengths.size)) {
            result = arrays_of(&scan, firsts);
        }
        Py_DECREF(firsts);
        free(scan.segments);
    }
    return answer(&buffers, result);
}
