/* Random plans, carried out by strided_copy.c under sanitizers, and byte by byte here. Regions are allocated to the byte. */
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

/* The same copy with no thought of speed. */
static void copy_slowly(uint8_t *target, const uint8_t *source, const int64_t *words, int into_memory) {
    int64_t axes = words[3], index[MOST_AXES] = {0};
    for (int64_t i = 0; i < axes; i++) {
        if (words[4 + 3 * i] == 0) {
            return;
        }
    }
    for (;;) {
        int64_t memory = words[1], shard = words[2];
        for (int64_t i = 0; i < axes; i++) {
            memory += index[i] * words[5 + 3 * i];
            shard += index[i] * words[6 + 3 * i];
        }
        target[into_memory ? memory : shard] = source[into_memory ? shard : memory];
        int64_t axis = axes - 1;
        while (axis >= 0 && ++index[axis] == words[4 + 3 * axis]) {
            index[axis--] = 0;
        }
        if (axis < 0) {
            return;
        }
    }
}

int main(int count, char **arguments) {
    int64_t rounds = count > 1 ? atoll(arguments[1]) : 1000, refused = 0;
    for (int64_t round = 0; round < rounds; round++) {
        srand((unsigned)round);
        int64_t words[4 + 3 * 6], axes = 1 + below(6), large = round % 100 == 0;
        int64_t memory_bytes = below(200), shard_bytes = below(200), dense = 1, apart = 1;
        words[0] = 0, words[1] = memory_bytes, words[2] = shard_bytes, words[3] = axes;
        for (int64_t i = axes - 1; i >= 0; i--) {
            int64_t extent = i == axes - 1 ? 1 + below(large ? 3000 : 600) : below(20) ? 1 + below(large && i == 0 ? 100 : 4) : 0;
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
        const char *error = NULL;
        Copy copies[8];
        Region regions[] = {{memory, memory_bytes}};
        int64_t length = 4 + 3 * axes, found = count_copies(words, length, &error);
        if (found >= 0 && found <= 8) {
            found = parse_copies(words, length, (Region){shard, shard_bytes}, regions, 1, into_memory, copies, 0, &error);
        }
        if (found < 0) {
            refused++;
        } else {
            run_copies(copies, found, 1 + (int)below(4));
            copy_slowly(expected, source, words, into_memory);
        }
        if ((found < 0) != (error != NULL) || memcmp(expected, target, (size_t)target_bytes) != 0) {
            fprintf(stderr, "round %lld differs\n", (long long)round);
            return 1;
        }
        free(expected), free(memory), free(shard);
    }
    printf("%lld plans, %lld refused\n", (long long)rounds, (long long)refused);
    return refused == 0;
}
