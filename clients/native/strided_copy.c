/* Strided copies between shards and memories: bounds, and rows written past the caches by several threads. */
#include "strided_copy.h"

#include <stdatomic.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "helpers.h"

#define HEADER_WORDS 4
#define WORDS_PER_AXIS 3
#define CHUNK ((int64_t)256 << 10)
/* Bytes that a thread takes at a time: one that loses its processor for a while takes fewer. */
#define LEAST_PER_THREAD ((int64_t)512 << 10)
/* Calling a helper takes as long as copying a tenth of this. */
#define LEAST_STREAMED ((int64_t)4 << 20)
/* Bytes of a call from which on the target is written past the caches, which would not hold it until it is read. */
#define LINE 64
#define LEAST_STREAMED_ROW (4 * LINE)
#define LEAST_FETCHED 1024
#define MOST_FETCHED (16 << 10)
/* Bytes of a row that is prefetched if it lies apart from the one before: processors foresee only what follows in a page. Shorter
 * rows that lie apart are not streamed either: both measured slower. */

int64_t count_copies(const int64_t *words, int64_t count, const char **error) {
    int64_t found = 0;
    for (int64_t at = 0; at < count; found++) {
        if (count - at < HEADER_WORDS) {
            *error = "the plan ends within a copy";
            return -1;
        }
        int64_t axes = words[at + 3];
        if (axes < 1 || axes >= MOST_AXES) {
            *error = "a copy has no axis, or too many";
            return -1;
        }
        if (count - at - HEADER_WORDS < axes * WORDS_PER_AXIS) {
            *error = "the plan ends within a copy";
            return -1;
        }
        at += HEADER_WORDS + axes * WORDS_PER_AXIS;
    }
    return found;
}

/* Whether a box lies within so many bytes; *span is the distance from its first byte to one past its last. */
static int is_within(int64_t offset, int64_t axes, const int64_t *axis, int stride_word, int64_t nbytes, int64_t *span) {
    int64_t last = 0;
    for (int64_t i = 0; i < axes; i++, axis += WORDS_PER_AXIS) {
        int64_t step;
        if (axis[stride_word] < 0 || __builtin_mul_overflow(axis[0] - 1, axis[stride_word], &step) ||
            __builtin_add_overflow(last, step, &last)) {
            return 0;
        }
    }
    *span = last + 1; /* compared first, so that a last of INT64_MAX does not get here */
    return offset >= 0 && offset < nbytes && last < nbytes - offset;
}

/* Write down the axes, joining those that are dense on both sides; 0 if the bytes cannot be counted. */
static int set_axes(Copy *copy, int64_t axes, const int64_t *axis, int source_word, int target_word, int64_t *nbytes) {
    copy->axes = 0;
    copy->width = 1;
    *nbytes = 1;
    for (int64_t i = axes - 1; i >= 0; i--) {
        const int64_t *word = axis + i * WORDS_PER_AXIS;
        int64_t extent = word[0], ours = word[source_word], theirs = word[target_word];
        if (__builtin_mul_overflow(*nbytes, extent, nbytes)) {
            return 0;
        }
        if (extent == 1) {
            continue;
        }
        int outermost = copy->axes - 1;
        int64_t run = copy->width, above = outermost;
        if (outermost < 0 && ours == run && theirs == run) {
            copy->width = run * extent;
        } else if (
            above >= 0 && ours == copy->source_strides[above] * copy->extent[above] &&
            theirs == copy->target_strides[above] * copy->extent[above]) {
            copy->extent[above] *= extent;
        } else {
            copy->extent[copy->axes] = extent; /* the innermost comes first */
            copy->source_strides[copy->axes] = ours;
            copy->target_strides[copy->axes] = theirs;
            copy->axes++;
        }
    }
    return 1;
}

int64_t parse_copies(
    const int64_t *words, int64_t count, Region shard, const Region *memories, int64_t memory_count, int into_memory,
    Copy *copies, int64_t done, const char **error) {
    for (int64_t at = 0; at < count;) {
        int64_t number = words[at], memory_offset = words[at + 1], shard_offset = words[at + 2], axes = words[at + 3];
        const int64_t *axis = words + at + HEADER_WORDS;
        at += HEADER_WORDS + axes * WORDS_PER_AXIS;
        int empty = 0;
        for (int64_t i = 0; i < axes; i++) {
            if (axis[i * WORDS_PER_AXIS] < 0) {
                *error = "an extent is negative";
                return -1;
            }
            empty |= axis[i * WORDS_PER_AXIS] == 0;
        }
        if (number < 0 || number >= memory_count) {
            *error = "a copy names a memory that was not given";
            return -1;
        }
        if (empty) {
            continue;
        }
        Region memory = memories[number];
        int64_t shard_span, memory_span;
        if (!is_within(shard_offset, axes, axis, 2, shard.nbytes, &shard_span)) {
            *error = "a copy goes beyond its shard";
            return -1;
        }
        if (!is_within(memory_offset, axes, axis, 1, memory.nbytes, &memory_span)) {
            *error = "a copy goes beyond its memory";
            return -1;
        }
        uint8_t *ours = shard.start + shard_offset, *theirs = memory.start + memory_offset;
        if ((uintptr_t)ours < (uintptr_t)theirs + (uint64_t)memory_span &&
            (uintptr_t)theirs < (uintptr_t)ours + (uint64_t)shard_span) {
            *error = "a copy's source and target overlap";
            return -1;
        }
        Copy *copy = &copies[done];
        copy->source = into_memory ? ours : theirs;
        copy->target = into_memory ? theirs : ours;
        int64_t nbytes, before = done ? copies[done - 1].end : 0;
        if (!set_axes(copy, axes, axis, into_memory ? 2 : 1, into_memory ? 1 : 2, &nbytes) ||
            __builtin_add_overflow(before, nbytes, &copy->end)) {
            *error = "the bytes of the plan cannot be counted";
            return -1;
        }
        done++;
    }
    return done;
}

#if defined(__SSE2__)
/* Copy a row without reading what it replaces into the caches. */
static void stream_row(uint8_t *target, const uint8_t *source, int64_t width, int64_t ahead) {
    int64_t head = -(intptr_t)target & (LINE - 1);
    memcpy(target, source, (size_t)head);
    target += head, source += head, width -= head;
    for (; width >= LINE; target += LINE, source += LINE, width -= LINE) {
        _mm_prefetch((const char *)((uintptr_t)source + (uintptr_t)ahead), _MM_HINT_T0);
        const __m128i *from = (const __m128i *)source;
        __m128i *to = (__m128i *)target;
        __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
        __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
        _mm_stream_si128(to, a);
        _mm_stream_si128(to + 1, b);
        _mm_stream_si128(to + 2, c);
        _mm_stream_si128(to + 3, d);
    }
    memcpy(target, source, (size_t)width);
}
#endif

static void copy_row(uint8_t *target, const uint8_t *source, int64_t width, int64_t ahead, int streamed) {
#if defined(__SSE2__)
    if (streamed && width >= LEAST_STREAMED_ROW) {
        stream_row(target, source, width, ahead);
        return;
    }
#else
    (void)ahead, (void)streamed;
#endif
    memcpy(target, source, (size_t)width);
}

/* Copy bytes `start` to `stop` of a copy, counted in the order of its axes. */
static void copy_range(const Copy *copy, int64_t start, int64_t stop, int streamed) {
    int64_t index[MOST_AXES], row = start / copy->width, into = start % copy->width;
    const uint8_t *source = copy->source;
    uint8_t *target = copy->target;
    int apart = copy->axes && copy->source_strides[0] != copy->width;
    int64_t ahead = apart && copy->width <= MOST_FETCHED ? copy->source_strides[0] : 0;
    streamed = streamed && !(apart && copy->width < LEAST_FETCHED);
    for (int axis = 0; axis < copy->axes; axis++) {
        index[axis] = row % copy->extent[axis];
        row /= copy->extent[axis];
        source += index[axis] * copy->source_strides[axis];
        target += index[axis] * copy->target_strides[axis];
    }
    for (;;) {
        int64_t width = copy->width - into;
        if (width > stop - start) {
            width = stop - start;
        }
        copy_row(target + into, source + into, width, ahead, streamed);
        start += width;
        into = 0;
        if (start == stop) {
            return;
        }
        for (int axis = 0;; axis++) {
            source += copy->source_strides[axis];
            target += copy->target_strides[axis];
            if (++index[axis] < copy->extent[axis]) {
                break;
            }
            source -= copy->source_strides[axis] * copy->extent[axis];
            target -= copy->target_strides[axis] * copy->extent[axis];
            index[axis] = 0;
        }
    }
}

typedef struct {
    const Copy *copies;
    int64_t count;
    int64_t nbytes;
    int streamed;
    _Atomic int64_t taken;
} Work;

/* Take chunks until there are none. */
static void work_off(void *argument) {
    Work *work = argument;
    for (;;) {
        int64_t start = atomic_fetch_add(&work->taken, CHUNK);
        if (start >= work->nbytes) {
            break;
        }
        int64_t stop = work->nbytes - start < CHUNK ? work->nbytes : start + CHUNK;
        int64_t low = 0, high = work->count - 1;
        while (low < high) {
            int64_t middle = low + (high - low) / 2;
            if (work->copies[middle].end > start) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        while (start < stop) {
            const Copy *copy = &work->copies[low];
            int64_t before = low ? copy[-1].end : 0, end = copy->end < stop ? copy->end : stop;
            copy_range(copy, start - before, end - before, work->streamed);
            start = end;
            low++;
        }
    }
#if defined(__SSE2__)
    _mm_sfence(); /* streamed stores are not ordered before what tells others that they are there */
#endif
}

void run_copies(const Copy *copies, int64_t count, int threads) {
    if (count == 0) {
        return;
    }
    int64_t nbytes = copies[count - 1].end;
    Work work = {copies, count, nbytes, nbytes >= LEAST_STREAMED, 0};
    if (threads > nbytes / LEAST_PER_THREAD) {
        threads = (int)(nbytes / LEAST_PER_THREAD);
    }
    work_together(work_off, &work, threads - 1);
}
