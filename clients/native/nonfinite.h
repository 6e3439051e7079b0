/* Count of elements that are NaN or infinite. Free of Python, so that sanitizers can run it alone. */
#ifndef WEIGHBRIDGE_NONFINITE_H
#define WEIGHBRIDGE_NONFINITE_H

#include <stdint.h>

/* Which elements of a dtype are non-finite: those of which all bits of `mask` are set in one pattern. In every floating-point format
 * these are the exponent's bits, in E4M3 the mantissa's as well. */
typedef struct {
    int64_t itemsize; /* bytes of one pattern: 1, 2, 4 or 8 */
    uint64_t mask;
    int64_t width; /* patterns of one element: 1, or 2 of a complex number */
} Encoding;

/* Bytes of one element. */
static inline int64_t element_bytes(const Encoding *encoding) { return encoding->itemsize * encoding->width; }

/* Whether an encoding is one that can be counted. */
int is_encoding(const Encoding *encoding);

/* How many elements are non-finite; a rest shorter than an element is left out. */
int64_t count_nonfinite(const uint8_t *bytes, int64_t nbytes, const Encoding *encoding);

/* A part of memory, and its encoding; an itemsize of 0 if it is not counted. */
typedef struct {
    const uint8_t *bytes;
    int64_t nbytes;
    const Encoding *encoding;
    int64_t *nonfinite; /* grows by its count */
} CountedPart;

/* Count parts, the calling thread being one of `threads`. */
void count_parts(const CountedPart *parts, int64_t count, int threads);

/* Lines of 64 bytes, each 16 bytes of which begin with an element, are compared in lanes of 8 or 16 bits: the mask of a wider pattern has
 * set bits in one lane of 16 only. In its other lanes `wanted` is what no masked lane equals. */
#define LANE_BYTES 16
#define LINE_BYTES 64
typedef uint8_t Lanes8 __attribute__((vector_size(LANE_BYTES), aligned(1), may_alias));
typedef uint16_t Lanes16 __attribute__((vector_size(LANE_BYTES), aligned(1), may_alias));

typedef struct {
    Lanes16 mask, wanted;
    int lane; /* bytes of a lane; 0 if nothing is counted */
} Screen;

Screen screen_of(const Encoding *encoding);

/* What of 16 bytes is non-finite: lanes of ones. `lane` is a constant where this is inlined. */
static inline __attribute__((always_inline)) Lanes16 screened(Lanes16 bytes, const Screen *screen, int lane) {
    if (lane == 1) {
        return (Lanes16)(((Lanes8)bytes & (Lanes8)screen->mask) == (Lanes8)screen->wanted);
    }
    return (Lanes16)((bytes & screen->mask) == screen->wanted);
}

/* The same of a line. */
static inline __attribute__((always_inline)) Lanes16 screened_line(const uint8_t *line, const Screen *screen, int lane) {
    const Lanes16 *part = (const Lanes16 *)line;
    return (screened(part[0], screen, lane) | screened(part[1], screen, lane)) |
           (screened(part[2], screen, lane) | screened(part[3], screen, lane));
}

static inline int any_lane(Lanes16 found) {
    typedef uint64_t Halves __attribute__((vector_size(LANE_BYTES), may_alias));
    Halves halves = (Halves)found;
    return (halves[0] | halves[1]) != 0;
}

#endif
