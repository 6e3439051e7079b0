/* Threads that share a piece of work, kept for the next one. */
#include "helpers.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <time.h>

#define IDLE_SECONDS 1

/* A piece of work, on the stack of who called for help. */
typedef struct Job {
    void (*work)(void *);
    void *argument;
    int seats;   /* how many may still join in */
    int working; /* how many have */
    struct Job *next;
} Job;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t called;
    pthread_cond_t finished;
    Job *jobs;
    int there; /* how many helpers there are */
} pool;

static pthread_once_t once = PTHREAD_ONCE_INIT;

static void reset(void) {
    pthread_condattr_t attributes;
    memset(&pool, 0, sizeof pool);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&pool.called, &attributes);
    pthread_cond_init(&pool.finished, NULL);
    pthread_condattr_destroy(&attributes);
}

static void hold(void) { pthread_mutex_lock(&pool.lock); }

static void let_go(void) { pthread_mutex_unlock(&pool.lock); }

static void set_up(void) {
    reset();
    pthread_atfork(hold, let_go, reset);
}

/* A piece of work that one more may join. The lock is held. */
static Job *job_with_a_seat(void) {
    Job *job = pool.jobs;
    while (job != NULL && !job->seats) {
        job = job->next;
    }
    return job;
}

static void *help(void *unused) {
    (void)unused;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_sec += IDLE_SECONDS;
        Job *job;
        int late = 0;
        while ((job = job_with_a_seat()) == NULL && !late) {
            late = pthread_cond_timedwait(&pool.called, &pool.lock, &until) == ETIMEDOUT;
        }
        if (job == NULL) {
            pool.there--;
            pthread_mutex_unlock(&pool.lock);
            return NULL;
        }
        job->seats--;
        job->working++;
        pthread_mutex_unlock(&pool.lock);
        job->work(job->argument);
        pthread_mutex_lock(&pool.lock);
        if (--job->working == 0) {
            pthread_cond_broadcast(&pool.finished);
        }
    }
}

/* Start helpers until there are so many, or as many as the system gives. The lock is held. */
static void start(int wanted) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    while (pool.there < wanted && pthread_create(&thread, &attributes, help, NULL) == 0) {
        pool.there++;
    }
    pthread_attr_destroy(&attributes);
}

void work_together(void (*work)(void *), void *argument, int most) {
    if (most <= 0) {
        work(argument);
        return;
    }
    Job job = {work, argument, most < MOST_HELPERS ? most : MOST_HELPERS, 0, NULL};
    pthread_once(&once, set_up);
    pthread_mutex_lock(&pool.lock);
    int wanted = 0;
    Job **last = &pool.jobs;
    for (; *last != NULL; last = &(*last)->next) {
        wanted += (*last)->seats + (*last)->working;
    }
    *last = &job;
    wanted += job.seats;
    start(wanted < MOST_HELPERS ? wanted : MOST_HELPERS);
    for (int i = 0; i < job.seats; i++) {
        pthread_cond_signal(&pool.called);
    }
    pthread_mutex_unlock(&pool.lock);
    work(argument);
    pthread_mutex_lock(&pool.lock);
    job.seats = 0; /* who comes now would find nothing left */
    while (job.working) {
        pthread_cond_wait(&pool.finished, &pool.lock);
    }
    for (last = &pool.jobs; *last != &job; last = &(*last)->next) {
    }
    *last = job.next;
    pthread_mutex_unlock(&pool.lock);
}
