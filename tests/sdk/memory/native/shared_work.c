/* Callers that share helpers, under sanitizers: every item is done once, and is seen to be by who called. With "fork", children share theirs, too. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "helpers.h"

#define ITEMS 400
#define CALLERS 4

typedef struct {
    _Atomic int taken;
    int done[ITEMS]; /* not atomic: a read must be ordered after the write */
} Job;

static void work(void *argument) {
    Job *job = argument;
    for (int item; (item = atomic_fetch_add(&job->taken, 1)) < ITEMS;) {
        job->done[item]++;
    }
}

static void *call_often(void *argument) {
    unsigned seed = (unsigned)(size_t)argument;
    for (int round = 0; round < 300; round++) {
        Job job;
        memset(&job, 0, sizeof job);
        work_together(work, &job, (int)(rand_r(&seed) % 6) - 1);
        for (int item = 0; item < ITEMS; item++) {
            if (job.done[item] != 1) {
                fprintf(stderr, "item %d was done %d times\n", item, job.done[item]);
                exit(1);
            }
        }
        if (rand_r(&seed) % 100 == 0) {
            usleep(1200000); /* helpers have gone by then */
        }
    }
    return NULL;
}

int main(int count, char **arguments) {
    pthread_t callers[CALLERS];
    for (size_t i = 0; i < CALLERS; i++) {
        pthread_create(&callers[i], NULL, call_often, (void *)(i + 1));
    }
    int failed = 0;
    for (int i = 0; count > 1 && !strcmp(arguments[1], "fork") && i < 40; i++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(20);
            Job job;
            memset(&job, 0, sizeof job);
            work_together(work, &job, 3);
            int total = 0;
            for (int item = 0; item < ITEMS; item++) {
                total += job.done[item];
            }
            _exit(total != ITEMS);
        }
        int status;
        waitpid(child, &status, 0);
        failed |= status;
    }
    for (int i = 0; i < CALLERS; i++) {
        pthread_join(callers[i], NULL);
    }
    return failed != 0;
}
