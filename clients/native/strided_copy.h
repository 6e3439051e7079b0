/* Strided copies between shards and memories. Free of Python, so that sanitizers can run it alone. */
#ifndef WEIGHBRIDGE_STRIDED_COPY_H
#define WEIGHBRIDGE_STRIDED_COPY_H

#include <stddef.h>
#include <stdint.h>

#include "nonfinite.h"

#define MOST_AXES 16
/* Axes of a copy. */

/* Bytes that may be read or written. */
typedef struct {
    uint8_t *start;
    int64_t nbytes;
} Region;

/* Rows of bytes that lie apart on both sides; made by `parse_copies`, which has checked it. */
typedef struct {
    const uint8_t *source;
    uint8_t *target;
    int axes;
    int64_t extent[MOST_AXES];
    int64_t source_strides[MOST_AXES];
    int64_t target_strides[MOST_AXES];
    int64_t width;
    int64_t end; /* bytes of this copy and of those before it */
    const Encoding *encoding; /* of the elements; NULL if those that are not finite are not counted */
    int64_t *nonfinite;       /* grows by how many are not */
    int narrowed;
} Copy;

/* What is done with the elements of a shard while it is copied.
 *
 * If they are narrowed, the shard is of float32 and the memory of bfloat16; offsets, strides and extents are those of bfloat16 on both
 * sides. Rounding is to nearest, ties to even. What is NaN or comes out infinite is not right, and makes *nonfinite grow. */
typedef struct {
    const Encoding *encoding; /* NULL if they are not counted; of what is written */
    int64_t *nonfinite;
    int narrowed; /* needs an encoding of 2 bytes, and is done into memory only */
} Work;

/* Number of copies in a packed plan, or -1 with *error set.
 *
 * A plan is int64 words, for each copy: the number of its memory, the offset there, the offset in the shard, the number of axes, and
 * for each axis the extent, the stride in memory and the stride in the shard, all in bytes. */
int64_t count_copies(const int64_t *words, int64_t count, const char **error);

/* Check every bound of a plan and add its copies behind the `done` ones before; the number of all, or -1 with *error set.
 *
 * An element that is copied to two places counts twice. Empty copies are dropped. Neighbouring axes that are dense on both sides become one. */
int64_t parse_copies(
    const int64_t *words, int64_t count, Region shard, const Region *memories, int64_t memory_count, int into_memory,
    Work work, Copy *copies, int64_t done, const char **error);

/* Carry out checked copies, the calling thread being one of `threads`. Bytes that are written twice have either value. */
void run_copies(const Copy *copies, int64_t count, int threads);

#endif
