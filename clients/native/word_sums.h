/* Sums of the words of memory, modulo 2**64. Free of Python, so that sanitizers can run it alone. */
#ifndef WEIGHBRIDGE_WORD_SUMS_H
#define WEIGHBRIDGE_WORD_SUMS_H

#include <stdint.h>

/* Rows of memory that are added up. */
typedef struct {
    const uint8_t *bytes; /* of the first row */
    int64_t pitch;        /* from a row to the next */
    int64_t width;        /* of a row */
    int64_t rows;
    int64_t word;         /* 1, 2, 4 or 8 */
    int64_t *sum;         /* grows by their sum */
} SummedRows;

/* Sum of words of 1, 2, 4 or 8 bytes, those of 1 without a sign; a rest shorter than a word is left out. */
int64_t sum_words(const uint8_t *bytes, int64_t nbytes, int64_t word);

/* Add rows up, the calling thread being one of `threads`. Several may share a sum. False if there is no memory to do so. */
int sum_rows(const SummedRows *summed, int64_t count, int threads);

#endif
