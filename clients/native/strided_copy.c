/* Strided copies between shards and memories: bounds, and rows written past the caches by several threads.
 *
 * Elements are screened while they are in registers on their way: a count of its own would read all of them once more. */
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
/* Bytes that a thread takes at a time: a thread that is preempted takes fewer. */
#define LEAST_PER_THREAD ((int64_t)512 << 10)
/* Calling a helper takes as long as copying a tenth of this. */
#define LEAST_STREAMED ((int64_t)4 << 20)
/* Bytes of a call from which on the target is written past the caches, which would evict it before it is read. */
#define LINE LINE_BYTES
#define LEAST_STREAMED_ROW (4 * LINE)
#define LEAST_FETCHED 1024
#define MOST_FETCHED (16 << 10)
/* Bytes of a row that is prefetched if it is not adjacent to the previous row: processors prefetch only within a page. Shorter rows
 * that are not adjacent are not streamed either: both measured slower. */
#define MOST_SCREENED_HERE 4096
#define NARROWING 2
/* Bytes of float32 for each of bfloat16. */
#define ROOM 4096
/* Bytes that are narrowed before they are written: they stay in the first cache. */

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
    if (offset < 0 || offset >= nbytes || last >= nbytes - offset) {
        return 0;
    }
    *span = last + 1; /* no more than the region's bytes */
    return 1;
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
    Work work, Copy *copies, int64_t done, const char **error) {
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
        int64_t shard_span, memory_span, scale = work.narrowed ? NARROWING : 1;
        if (!is_within(shard_offset, axes, axis, 2, shard.nbytes / scale, &shard_span)) {
            *error = "a copy goes beyond its shard";
            return -1;
        }
        if (!is_within(memory_offset, axes, axis, 1, memory.nbytes, &memory_span)) {
            *error = "a copy goes beyond its memory";
            return -1;
        }
        uint8_t *ours = shard.start + shard_offset * scale, *theirs = memory.start + memory_offset;
        if ((uintptr_t)ours < (uintptr_t)theirs + (uint64_t)memory_span &&
            (uintptr_t)theirs < (uintptr_t)ours + (uint64_t)(shard_span * scale)) {
            *error = "a copy's source and target overlap";
            return -1;
        }
        Copy *copy = &copies[done];
        copy->source = into_memory ? ours : theirs;
        copy->target = into_memory ? theirs : ours;
        copy->encoding = work.encoding;
        copy->nonfinite = work.nonfinite;
        copy->narrowed = work.narrowed;
        int64_t nbytes, before = done ? copies[done - 1].end : 0;
        if (!set_axes(copy, axes, axis, into_memory ? 2 : 1, into_memory ? 1 : 2, &nbytes) ||
            __builtin_add_overflow(before, nbytes, &copy->end)) {
            *error = "the bytes of the plan cannot be counted";
            return -1;
        }
        if (copy->encoding != NULL && copy->width % element_bytes(copy->encoding)) {
            *error = "a copy cuts elements that are to be counted";
            return -1;
        }
        done++;
    }
    return done;
}

#if defined(__SSE2__)
/* Copy a row without reading what it replaces into the caches; whether any of its elements is non-finite, as far as `lane` is not 0. */
static inline __attribute__((always_inline)) int stream_lanes(
    uint8_t *target, const uint8_t *source, int64_t width, int64_t ahead, const Screen *screen, int lane) {
    Lanes16 found = {0};
    if (lane) { /* what is copied apart from whole lines, as parts of the first and the last of them */
        found = screened_line(source, screen, lane) | screened_line(source + width - LINE, screen, lane);
    }
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
        if (lane) {
            found |= (screened((Lanes16)a, screen, lane) | screened((Lanes16)b, screen, lane)) |
                     (screened((Lanes16)c, screen, lane) | screened((Lanes16)d, screen, lane));
        }
    }
    memcpy(target, source, (size_t)width);
    return lane && any_lane(found);
}

static int stream_row(uint8_t *target, const uint8_t *source, int64_t width, int64_t ahead, const Screen *screen) {
    switch (screen->lane) {
    case 0:
        return stream_lanes(target, source, width, ahead, screen, 0);
    case 1:
        return stream_lanes(target, source, width, ahead, screen, 1);
    default:
        return stream_lanes(target, source, width, ahead, screen, 2);
    }
}
#endif

/* Whether any element of a short row is non-finite. */
static int screen_short(const uint8_t *source, int64_t width, const Screen *screen) {
    Lanes16 found = {0};
    for (int64_t at = 0;;) { /* the last lanes may be looked at twice */
        const Lanes16 *part = (const Lanes16 *)(source + at);
        found |= screen->lane == 1 ? screened(*part, screen, 1) : screened(*part, screen, 2);
        if (at == width - LANE_BYTES) {
            return any_lane(found);
        }
        at = at + LANE_BYTES <= width - LANE_BYTES ? at + LANE_BYTES : width - LANE_BYTES;
    }
}

typedef uint32_t Floats __attribute__((aligned(1), may_alias));

/* Narrow elements; whether any is NaN or infinite before or after. */
static inline __attribute__((always_inline)) int narrow(uint16_t *restrict target, const Floats *restrict source, int64_t elements) {
    const uint32_t exponent = 0x7F800000;
    uint32_t found = 0;
    for (int64_t i = 0; i < elements; i++) {
        uint32_t rounded = source[i] + 0x7FFF + (source[i] >> 16 & 1);
        target[i] = (uint16_t)(rounded >> 16);
        found |= ((source[i] & exponent) == exponent) | ((rounded & exponent) == exponent);
    }
    return found != 0;
}

static int narrow_plainly(uint16_t *target, const Floats *source, int64_t elements) { return narrow(target, source, elements); }

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("avx2"))) static int narrow_by_avx2(uint16_t *target, const Floats *source, int64_t elements) {
    return narrow(target, source, elements);
}
#endif

/* Narrow a part of a row into its target. */
static int64_t narrow_row(uint8_t *target, const uint8_t *source, int64_t width, int streamed) {
    uint16_t room[ROOM / sizeof(uint16_t)];
    int found = 0, (*way)(uint16_t *, const Floats *, int64_t) = narrow_plainly;
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("avx2")) {
        way = narrow_by_avx2;
    }
#endif
    while (width > 0) {
        int64_t taken = width < ROOM ? width : ROOM;
        found |= way(room, (const Floats *)source, taken / (int64_t)sizeof(uint16_t));
#if defined(__SSE2__)
        if (streamed && taken >= LEAST_STREAMED_ROW) {
            stream_lanes(target, (const uint8_t *)room, taken, 0, NULL, 0);
        } else
#endif
        {
            memcpy(target, room, (size_t)taken);
        }
        target += taken, source += taken * NARROWING, width -= taken;
    }
    (void)streamed;
    return found;
}

/* Copy bytes `into` and on of a row; how many elements that begin there are non-finite. */
static int64_t copy_row(
    uint8_t *target, const uint8_t *source, int64_t into, int64_t width, int64_t ahead, int streamed, const Encoding *encoding,
    const Screen *screen) {
    int64_t size = encoding == NULL ? 1 : element_bytes(encoding);
#if defined(__SSE2__)
    if (streamed && width >= LEAST_STREAMED_ROW) {
        static const Screen none = {.lane = 0};
        int64_t head = -(intptr_t)(target + into) & (LINE - 1);
        int whole = encoding != NULL && (into | width | head) % size == 0;
        int found = stream_row(target + into, source + into, width, ahead, whole ? screen : &none);
        if (whole) {
            return found ? count_nonfinite(source + into, width, encoding) : 0;
        }
    } else
#else
    (void)ahead, (void)streamed, (void)screen;
#endif
    {
        memcpy(target + into, source + into, (size_t)width);
    }
    if (encoding == NULL) {
        return 0;
    }
    int64_t first = (into + size - 1) / size * size, last = (into + width + size - 1) / size * size;
    if (last - first <= MOST_SCREENED_HERE && last - first >= LANE_BYTES && !screen_short(source + first, last - first, screen)) {
        return 0;
    }
    return count_nonfinite(source + first, last - first, encoding);
}

/* Copy bytes `start` to `stop` of a copy, counted in the order of its axes. */
static void copy_range(const Copy *copy, int64_t start, int64_t stop, int streamed) {
    int64_t index[MOST_AXES], row = start / copy->width, into = start % copy->width, scale = copy->narrowed ? NARROWING : 1;
    const uint8_t *source = copy->source;
    uint8_t *target = copy->target;
    int apart = copy->axes && copy->source_strides[0] != copy->width;
    int64_t ahead = apart && copy->width <= MOST_FETCHED ? copy->source_strides[0] : 0;
    streamed = streamed && !(apart && copy->width < LEAST_FETCHED);
    Screen screen = copy->encoding == NULL ? (Screen){.lane = 0} : screen_of(copy->encoding);
    int64_t nonfinite = 0;
    for (int axis = 0; axis < copy->axes; axis++) {
        index[axis] = row % copy->extent[axis];
        row /= copy->extent[axis];
        source += index[axis] * copy->source_strides[axis] * scale;
        target += index[axis] * copy->target_strides[axis];
    }
    for (;;) {
        int64_t width = copy->width - into;
        if (width > stop - start) {
            width = stop - start;
        }
        nonfinite += copy->narrowed ? narrow_row(target + into, source + into * scale, width, streamed)
                                    : copy_row(target, source, into, width, ahead, streamed, copy->encoding, &screen);
        start += width;
        into = 0;
        if (start == stop) {
            break;
        }
        for (int axis = 0;; axis++) {
            source += copy->source_strides[axis] * scale;
            target += copy->target_strides[axis];
            if (++index[axis] < copy->extent[axis]) {
                break;
            }
            source -= copy->source_strides[axis] * copy->extent[axis] * scale;
            target -= copy->target_strides[axis] * copy->extent[axis];
            index[axis] = 0;
        }
    }
    if (nonfinite) {
        __atomic_fetch_add(copy->nonfinite, nonfinite, __ATOMIC_RELAXED);
    }
}

typedef struct {
    const Copy *copies;
    int64_t count;
    int64_t nbytes;
    int streamed;
    _Atomic int64_t taken;
} Shared;

/* Take chunks until there are none. */
static void work_off(void *argument) {
    Shared *work = argument;
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
    Shared work = {copies, count, nbytes, nbytes >= LEAST_STREAMED, 0};
    if (threads > nbytes / LEAST_PER_THREAD) {
        threads = (int)(nbytes / LEAST_PER_THREAD);
    }
    work_together(work_off, &work, threads - 1);
}
