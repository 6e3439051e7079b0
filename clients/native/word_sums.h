/* Sums of the words of memory, modulo 2**64. Free of Python, so that sanitizers can run it alone. */
#ifndef WEIGHBRIDGE_WORD_SUMS_H
#define WEIGHBRIDGE_WORD_SUMS_H

#include <stdint.h>

/* A part of memory that is added up. */
typedef struct {
    const uint8_t *bytes;
    int64_t nbytes;
    int64_t *sum; /* grows by its sum */
} SummedPart;

/* Sum of words of 1, 2, 4 or 8 bytes, those of 1 without a sign; a rest shorter than a word is left out. */
int64_t sum_words(const uint8_t *bytes, int64_t nbytes, int64_t word);

/* Add parts up, the calling thread being one of `threads`; each part has a sum of its own. */
void sum_parts(const SummedPart *parts, int64_t count, int64_t word, int threads);

#endif
