/* Threads that share a piece of work, kept for the next one. */
#include "helpers.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <time.h>

#define IDLE_SECONDS 1

static struct {
    pthread_mutex_t lock;
    pthread_cond_t called;
    pthread_cond_t finished;
    void (*work)(void *);
    void *argument;
    int busy;    /* whether somebody has the helpers */
    int seats;   /* how many may still join in */
    int working; /* how many have */
    int there;   /* how many there are */
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

static void *help(void *unused) {
    (void)unused;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_sec += IDLE_SECONDS;
        int late = 0;
        while (!pool.seats && !late) {
            late = pthread_cond_timedwait(&pool.called, &pool.lock, &until) == ETIMEDOUT;
        }
        if (!pool.seats) {
            pool.there--;
            pthread_mutex_unlock(&pool.lock);
            return NULL;
        }
        pool.seats--;
        pool.working++;
        void (*work)(void *) = pool.work;
        void *argument = pool.argument;
        pthread_mutex_unlock(&pool.lock);
        work(argument);
        pthread_mutex_lock(&pool.lock);
        if (--pool.working == 0) {
            pthread_cond_signal(&pool.finished);
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
    if (most > MOST_HELPERS) {
        most = MOST_HELPERS;
    }
    if (most > 0) {
        pthread_once(&once, set_up);
        pthread_mutex_lock(&pool.lock);
        int mine = !pool.busy;
        if (mine) {
            start(most);
            pool.busy = 1;
            pool.work = work;
            pool.argument = argument;
            pool.seats = most;
            for (int i = 0; i < most; i++) {
                pthread_cond_signal(&pool.called);
            }
        }
        pthread_mutex_unlock(&pool.lock);
        if (mine) {
            work(argument);
            pthread_mutex_lock(&pool.lock);
            pool.seats = 0; /* who comes now would find nothing left */
            while (pool.working) {
                pthread_cond_wait(&pool.finished, &pool.lock);
            }
            pool.busy = 0;
            pthread_mutex_unlock(&pool.lock);
            return;
        }
    }
    work(argument);
}
