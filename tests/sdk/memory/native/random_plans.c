/* Random plans, carried out by strided_copy.c under sanitizers, and byte by byte here; what is not finite on the way is counted by both.
 * Regions are allocated to the byte. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "strided_copy.h"

static int64_t below(int64_t n) { return rand() % n; }

static uint8_t *filled(int64_t nbytes) {
    uint8_t *made = malloc((size_t)nbytes);
    for (int64_t i = 0; i < nbytes; i++) {
        made[i] = (uint8_t)rand();
    }
    return made;
}

static const Encoding ENCODINGS[] = {
    {1, 0x7F, 1}, {1, 0x7C, 1}, {1, 0xFF, 1}, {2, 0x7C00, 1}, {2, 0x7F80, 1}, {4, 0x7F800000, 1}, {8, 0x7FF0000000000000, 1},
    {4, 0x7F800000, 2},
};

/* Whether an element is non-finite, byte by byte. */
static int is_nonfinite(const uint8_t *element, const Encoding *encoding) {
    for (int64_t each = 0; each < encoding->width; each++, element += encoding->itemsize) {
        uint64_t pattern = 0;
        for (int64_t i = encoding->itemsize - 1; i >= 0; i--) {
            pattern = pattern << 8 | element[i];
        }
        if ((pattern & encoding->mask) == encoding->mask) {
            return 1;
        }
    }
    return 0;
}

/* The same copy with no thought of speed; how many elements of it are non-finite, if they are counted. */
static int64_t copy_slowly(
    uint8_t *target, const uint8_t *source, const int64_t *words, int into_memory, const Encoding *encoding) {
    int64_t axes = words[3], index[MOST_AXES] = {0}, nonfinite = 0;
    for (int64_t i = 0; i < axes; i++) {
        if (words[4 + 3 * i] == 0) {
            return 0;
        }
    }
    for (;;) {
        int64_t memory = words[1], shard = words[2];
        for (int64_t i = 0; i < axes; i++) {
            memory += index[i] * words[5 + 3 * i];
            shard += index[i] * words[6 + 3 * i];
        }
        const uint8_t *from = &source[into_memory ? shard : memory];
        target[into_memory ? memory : shard] = *from;
        if (encoding != NULL && index[axes - 1] % element_bytes(encoding) == 0) {
            nonfinite += is_nonfinite(from, encoding);
        }
        int64_t axis = axes - 1;
        while (axis >= 0 && ++index[axis] == words[4 + 3 * axis]) {
            index[axis--] = 0;
        }
        if (axis < 0) {
            return nonfinite;
        }
    }
}

/* A matrix of float32 that is narrowed into rows that lie apart, and element by element here; 0 if both agree. */
static int narrow_matrix(void) {
    int64_t rows = 1 + below(5), columns = 1 + below(below(9) ? 700 : 9000), gap = below(3) * below(90), offset = below(70);
    int64_t shard_bytes = 4 * rows * columns, pitch = 2 * columns + gap, memory_bytes = offset + rows * pitch;
    uint8_t *shard = filled(shard_bytes), *memory = filled(memory_bytes), *expected = malloc((size_t)memory_bytes);
    memcpy(expected, memory, (size_t)memory_bytes);
    int broken = 0, tame = below(3) > 0;
    for (int64_t i = 0; i < rows * columns; i++) {
        uint32_t bits;
        memcpy(&bits, shard + 4 * i, 4);
        bits = tame ? bits & 0xBFFFFFFF : bits;
        memcpy(shard + 4 * i, &bits, 4);
        uint64_t low = bits & 0xFFFF, up = low > 0x8000 || (low == 0x8000 && (bits >> 16 & 1));
        uint16_t rounded = (uint16_t)((bits >> 16) + up);
        broken |= (bits & 0x7F800000) == 0x7F800000 || (rounded & 0x7F80) == 0x7F80;
        memcpy(expected + offset + i / columns * pitch + i % columns * 2, &rounded, 2);
    }
    int64_t words[] = {0, offset, 0, 2, rows, pitch, 2 * columns, 2 * columns, 1, 1}, nonfinite = 0;
    Encoding encoding = {2, 0x7F80, 1};
    Work work = {&encoding, &nonfinite, 1};
    Region regions[] = {{memory, memory_bytes}};
    Copy copies[1];
    const char *error = NULL;
    int64_t short_by = below(4) ? 0 : 1 + below(shard_bytes);
    int64_t found = parse_copies(words, 10, (Region){shard, shard_bytes - short_by}, regions, 1, 1, work, copies, 0, &error);
    int failed = (found < 0) != (short_by > 0);
    if (found > 0) {
        run_copies(copies, found, 1 + (int)below(4));
        failed |= (nonfinite > 0) != broken || (!broken && memcmp(memory, expected, (size_t)memory_bytes) != 0);
    }
    free(shard), free(memory), free(expected);
    return failed;
}

int main(int count, char **arguments) {
    int64_t rounds = count > 1 ? atoll(arguments[1]) : 1000, refused = 0;
    for (int64_t round = 0; round < rounds; round++) {
        srand((unsigned)round);
        int64_t words[4 + 3 * 6], axes = 1 + below(6), large = round % 100 == 0;
        const Encoding *encoding = round % 3 ? &ENCODINGS[below(sizeof ENCODINGS / sizeof *ENCODINGS)] : NULL;
        int64_t element = encoding == NULL ? 1 : element_bytes(encoding);
        int64_t memory_bytes = below(200), shard_bytes = below(200), dense = 1, apart = 1;
        words[0] = 0, words[1] = memory_bytes, words[2] = shard_bytes, words[3] = axes;
        for (int64_t i = axes - 1; i >= 0; i--) {
            int64_t extent = i == axes - 1 ? element * (1 + below((large ? 3000 : 600) / element)) : below(20) ? 1 + below(large && i == 0 ? 100 : 4) : 0;
            words[4 + 3 * i] = extent;
            words[5 + 3 * i] = apart;
            words[6 + 3 * i] = dense;
            memory_bytes += extent ? (extent - 1) * apart : 0;
            shard_bytes += extent ? (extent - 1) * dense : 0;
            dense *= extent ? extent : 1;
            apart = apart * (extent ? extent : 1) + below(3) * below(100);
        }
        memory_bytes++, shard_bytes++;
        if (round % 5 == 1) {
            memory_bytes -= 1 + below(memory_bytes); /* too short by at least one */
        }
        if (round % 5 == 2) {
            static const int64_t bad[] = {-1, INT64_MIN, INT64_MAX, INT64_MAX / 2, (int64_t)1 << 62, 17};
            words[below(4 + 3 * axes)] = bad[below(6)];
        }
        int into_memory = (int)below(2);
        uint8_t *memory = filled(memory_bytes), *shard = filled(shard_bytes);
        uint8_t *target = into_memory ? memory : shard, *source = into_memory ? shard : memory;
        int64_t target_bytes = into_memory ? memory_bytes : shard_bytes;
        uint8_t *expected = malloc((size_t)target_bytes);
        memcpy(expected, target, (size_t)target_bytes);
        if (encoding != NULL && round % 2) { /* random bits of wide patterns are hardly ever non-finite */
            for (int64_t i = 0, bytes = into_memory ? shard_bytes : memory_bytes; i < bytes; i++) {
                source[i] |= below(3) ? 0 : 0xFF;
            }
        }
        const char *error = NULL;
        int64_t nonfinite = 0, expected_nonfinite = 0;
        Copy copies[8];
        Region regions[] = {{memory, memory_bytes}};
        int64_t length = 4 + 3 * axes, found = count_copies(words, length, &error);
        if (found >= 0 && found <= 8) {
            found = parse_copies(words, length, (Region){shard, shard_bytes}, regions, 1, into_memory, (Work){encoding, &nonfinite, 0}, copies, 0, &error);
        }
        if (found < 0) {
            refused++;
        } else {
            run_copies(copies, found, 1 + (int)below(4));
            expected_nonfinite = copy_slowly(expected, source, words, into_memory, encoding);
        }
        if ((found < 0) != (error != NULL) || memcmp(expected, target, (size_t)target_bytes) != 0 ||
            nonfinite != expected_nonfinite) {
            fprintf(stderr, "round %lld differs\n", (long long)round);
            return 1;
        }
        if (encoding != NULL) {
            CountedPart parts[5];
            int64_t counts[5] = {0}, elements = (into_memory ? shard_bytes : memory_bytes) / element, by_one = 0, at = 0, sum = 0;
            for (int i = 0; i < 5; i++) { /* anywhere in the source, whole elements from its first byte on */
                int64_t taken = i == 4 ? elements - at : below(elements - at + 1);
                parts[i] = (CountedPart){source + at * element, taken * element, encoding, &counts[i]};
                at += taken;
            }
            count_parts(parts, 5, 1 + (int)below(4));
            for (int64_t i = 0; i < elements; i++) {
                by_one += is_nonfinite(source + i * element, encoding);
            }
            for (int i = 0; i < 5; i++) {
                sum += counts[i];
            }
            if (sum != by_one) {
                fprintf(stderr, "round %lld counts %lld, not %lld\n", (long long)round, (long long)sum, (long long)by_one);
                return 1;
            }
        }
        free(expected), free(memory), free(shard);
        if (narrow_matrix()) {
            fprintf(stderr, "round %lld narrows to something else\n", (long long)round);
            return 1;
        }
    }
    printf("%lld plans, %lld refused\n", (long long)rounds, (long long)refused);
    return refused == 0;
}
