/* Sums of the words of memory: plain loops, which compilers turn into vectors. */
#include "word_sums.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "helpers.h"

#define PART_BYTES ((int64_t)1 << 20) /* whole words of any size */

typedef int16_t Words16 __attribute__((aligned(1), may_alias));
typedef int32_t Words32 __attribute__((aligned(1), may_alias));
typedef int64_t Words64 __attribute__((aligned(1), may_alias));

#define ADD_UP(type)                                              \
    do {                                                          \
        const type *words = (const type *)bytes;                  \
        for (int64_t i = 0; i < nbytes / (int64_t)sizeof(type); i++) { \
            sum += (uint64_t)(int64_t)words[i];                   \
        }                                                         \
    } while (0)

int64_t sum_words(const uint8_t *bytes, int64_t nbytes, int64_t word) {
    uint64_t sum = 0; /* unsigned: it wraps around */
    switch (word) {
    case 1: ADD_UP(uint8_t); break;
    case 2: ADD_UP(Words16); break;
    case 4: ADD_UP(Words32); break;
    default: ADD_UP(Words64); break;
    }
    return (int64_t)sum;
}

/* Some rows, or a part of one, that one thread adds up. */
typedef struct {
    const SummedRows *of;
    int64_t start; /* in its row */
    int64_t row, rows;
} Part;

typedef struct {
    const Part *parts;
    int64_t count;
    _Atomic int64_t taken;
} Work;

/* Take parts until there are none. */
static void work_off(void *argument) {
    Work *work = argument;
    for (int64_t at; (at = atomic_fetch_add(&work->taken, 1)) < work->count;) {
        const Part *part = &work->parts[at];
        const SummedRows *of = part->of;
        int64_t left = of->width - part->start;
        int64_t width = left < PART_BYTES || part->rows > 1 ? left : PART_BYTES;
        uint64_t sum = 0;
        for (int64_t row = part->row; row < part->row + part->rows; row++) {
            sum += (uint64_t)sum_words(of->bytes + row * of->pitch + part->start, width, of->word);
        }
        __atomic_fetch_add((uint64_t *)of->sum, sum, __ATOMIC_RELAXED);
    }
}

/* Cut rows into parts of about PART_BYTES; how many. Written where there is room for them, unless it is NULL. */
static int64_t cut(const SummedRows *of, Part *parts) {
    int64_t count = 0;
    if (of->width < PART_BYTES) {
        int64_t rows = PART_BYTES / (of->width ? of->width : 1);
        for (int64_t row = 0; row < of->rows; row += rows, count++) {
            if (parts != NULL) {
                parts[count] = (Part){of, 0, row, rows < of->rows - row ? rows : of->rows - row};
            }
        }
        return count;
    }
    for (int64_t row = 0; row < of->rows; row++) {
        for (int64_t start = 0; start < of->width; start += PART_BYTES, count++) {
            if (parts != NULL) {
                parts[count] = (Part){of, start, row, 1};
            }
        }
    }
    return count;
}

int sum_rows(const SummedRows *summed, int64_t count, int threads) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++) {
        total += cut(&summed[i], NULL);
    }
    Part *parts = malloc((size_t)(total + 1) * sizeof(Part));
    if (parts == NULL) {
        return 0;
    }
    int64_t at = 0;
    for (int64_t i = 0; i < count; i++) {
        at += cut(&summed[i], parts + at);
    }
    Work work = {parts, total, 0};
    if (threads > total) {
        threads = (int)total;
    }
    work_together(work_off, &work, threads - 1);
    free(parts);
    return 1;
}
