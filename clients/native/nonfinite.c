/* Count of non-finite elements: nearly all tensors have none, so blocks are screened, and counted where the screen finds something. */
#include "nonfinite.h"

#include <stdatomic.h>
#include <string.h>

#include "helpers.h"

#define BLOCK ((int64_t)16 << 10)
/* Bytes that are screened at a time; they stay in the first cache for the exact count. */

#define MOST_SUMMED 240
/* Elements of which any number fits into 8 bits; a multiple of all vectors. */

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_AVX2_PATH 1
#endif

typedef uint8_t Patterns8 __attribute__((aligned(1), may_alias));
typedef uint16_t Patterns16 __attribute__((aligned(1), may_alias));
typedef uint32_t Patterns32 __attribute__((aligned(1), may_alias));
typedef uint64_t Patterns64 __attribute__((aligned(1), may_alias));

int is_encoding(const Encoding *encoding) {
    int64_t size = encoding->itemsize;
    int known = size == 1 || size == 2 || size == 4 || size == 8;
    /* a screen looks at the highest 16 bits of a pattern only */
    return known && (encoding->width == 1 || (encoding->width == 2 && size <= 8)) && encoding->mask != 0 &&
           (size == 8 || encoding->mask >> (8 * size) == 0) &&
           (size <= 2 || (encoding->mask & (((uint64_t)1 << (8 * size - 16)) - 1)) == 0);
}

Screen screen_of(const Encoding *encoding) {
    Screen screen;
    uint8_t pattern[8];
    for (int i = 0; i < 8; i++) {
        pattern[i] = (uint8_t)(encoding->mask >> (8 * (i % encoding->itemsize)));
    }
    memcpy(&screen.mask, pattern, 8);
    memcpy((uint8_t *)&screen.mask + 8, pattern, 8);
    screen.wanted = screen.mask;
    screen.lane = encoding->itemsize == 1 ? 1 : 2;
    for (int i = 0; i < LANE_BYTES / 2 && screen.lane == 2; i++) {
        if (screen.mask[i] == 0) {
            screen.wanted[i] = 1;
        }
    }
    return screen;
}

#define COUNT(Patterns)                                                                                                            \
    do {                                                                                                                           \
        const Patterns *each = (const Patterns *)bytes;                                                                            \
        Patterns mask = (Patterns)encoding->mask;                                                                                  \
        if (encoding->width == 1) {                                                                                                \
            for (int64_t i = 0; i < elements;) { /* sums of a few fit into lanes of the patterns' own size */                      \
                Patterns sum = 0;                                                                                                  \
                for (int64_t stop = elements - i < MOST_SUMMED ? elements : i + MOST_SUMMED; i < stop; i++) {                      \
                    sum += (each[i] & mask) == mask;                                                                               \
                }                                                                                                                  \
                found += (int64_t)sum;                                                                                             \
            }                                                                                                                      \
        } else {                                                                                                                   \
            for (int64_t i = 0; i < 2 * elements; i += 2) {                                                                        \
                found += (each[i] & mask) == mask || (each[i + 1] & mask) == mask;                                                 \
            }                                                                                                                      \
        }                                                                                                                          \
    } while (0)

static int64_t count_exactly(const uint8_t *bytes, int64_t nbytes, const Encoding *encoding) {
    int64_t found = 0, elements = nbytes / element_bytes(encoding);
    switch (encoding->itemsize) {
    case 1:
        COUNT(Patterns8);
        break;
    case 2:
        COUNT(Patterns16);
        break;
    case 4:
        COUNT(Patterns32);
        break;
    default:
        COUNT(Patterns64);
    }
    return found;
}

/* Whether any of so many whole lines has a non-finite element. */
static inline __attribute__((always_inline)) int screen_lines(const uint8_t *bytes, int64_t lines, const Screen *screen, int lane) {
    Lanes16 found = {0};
    for (int64_t i = 0; i < lines; i++) {
        found |= screened_line(bytes + i * LINE_BYTES, screen, lane);
    }
    return any_lane(found);
}

static int screen_plainly(const uint8_t *bytes, int64_t lines, const Screen *screen) {
    return screen->lane == 1 ? screen_lines(bytes, lines, screen, 1) : screen_lines(bytes, lines, screen, 2);
}

#if HAS_AVX2_PATH
#include <immintrin.h>

/* The same with vectors of 32 bytes, which compilers do not make of those of 16. */
__attribute__((target("avx2"))) static int screen_by_avx2(const uint8_t *bytes, int64_t lines, const Screen *screen) {
    __m128i half_mask, half_wanted;
    memcpy(&half_mask, &screen->mask, sizeof half_mask);
    memcpy(&half_wanted, &screen->wanted, sizeof half_wanted);
    __m256i mask = _mm256_broadcastsi128_si256(half_mask), wanted = _mm256_broadcastsi128_si256(half_wanted);
    __m256i first = _mm256_setzero_si256(), second = _mm256_setzero_si256();
    int bytewise = screen->lane == 1;
    for (int64_t i = 0; i < lines; i++, bytes += LINE_BYTES) {
        __m256i a = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)bytes), mask);
        __m256i b = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(bytes + LINE_BYTES / 2)), mask);
        if (bytewise) {
            first = _mm256_or_si256(first, _mm256_cmpeq_epi8(a, wanted));
            second = _mm256_or_si256(second, _mm256_cmpeq_epi8(b, wanted));
        } else {
            first = _mm256_or_si256(first, _mm256_cmpeq_epi16(a, wanted));
            second = _mm256_or_si256(second, _mm256_cmpeq_epi16(b, wanted));
        }
    }
    first = _mm256_or_si256(first, second);
    return !_mm256_testz_si256(first, first);
}
#endif

int64_t count_nonfinite(const uint8_t *bytes, int64_t nbytes, const Encoding *encoding) {
    int64_t found = 0;
    if (nbytes < LINE_BYTES) {
        return count_exactly(bytes, nbytes, encoding);
    }
    Screen screen = screen_of(encoding);
    int (*any)(const uint8_t *, int64_t, const Screen *) = screen_plainly;
#if HAS_AVX2_PATH
    if (__builtin_cpu_supports("avx2")) {
        any = screen_by_avx2;
    }
#endif
    nbytes -= nbytes % element_bytes(encoding);
    while (nbytes >= LINE_BYTES) {
        int64_t taken = nbytes < BLOCK ? nbytes - nbytes % LINE_BYTES : BLOCK;
        if (any(bytes, taken / LINE_BYTES, &screen)) {
            found += count_exactly(bytes, taken, encoding);
        }
        bytes += taken, nbytes -= taken;
    }
    return found + count_exactly(bytes, nbytes, encoding);
}

typedef struct {
    const CountedPart *parts;
    int64_t count;
    _Atomic int64_t taken;
} Work;

/* Take parts until there are none. */
static void work_off(void *argument) {
    Work *work = argument;
    for (int64_t at; (at = atomic_fetch_add(&work->taken, 1)) < work->count;) {
        const CountedPart *part = &work->parts[at];
        if (part->encoding->itemsize) {
            *part->nonfinite += count_nonfinite(part->bytes, part->nbytes, part->encoding);
        }
    }
}

void count_parts(const CountedPart *parts, int64_t count, int threads) {
    Work work = {parts, count, 0};
    if (threads > count) {
        threads = (int)count;
    }
    work_together(work_off, &work, threads - 1);
}
