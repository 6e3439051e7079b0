/* Sums of the words of memory: plain loops, which compilers turn into vectors. */
#include "word_sums.h"

#include <stdatomic.h>

#include "helpers.h"

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

typedef struct {
    const SummedPart *parts;
    int64_t count, word;
    _Atomic int64_t taken;
} Work;

/* Take parts until there are none. */
static void work_off(void *argument) {
    Work *work = argument;
    for (int64_t at; (at = atomic_fetch_add(&work->taken, 1)) < work->count;) {
        const SummedPart *part = &work->parts[at];
        *part->sum = (int64_t)((uint64_t)*part->sum + (uint64_t)sum_words(part->bytes, part->nbytes, work->word));
    }
}

void sum_parts(const SummedPart *parts, int64_t count, int64_t word, int threads) {
    Work work = {parts, count, word, 0};
    if (threads > count) {
        threads = (int)count;
    }
    work_together(work_off, &work, threads - 1);
}
