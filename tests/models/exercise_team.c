/* Teams of the pool: every thread takes part and waits at a barrier, items are shared out once, several callers at a time
 * and a child of a fork get right results. Ends with 0 if all were right. */
#include "team.h"

#include <pthread.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

void set_pool_threads(int64_t threads);
int uses_openmp(void);

enum { THREADS = 3, ITEMS = 100 };

static _Atomic int wrong;

struct meeting {
    _Atomic int64_t came;
    int64_t count;
};

static void meet(const struct member *me, void *of) {
    struct meeting *m = of;
    m->came++;
    wait_for_team(me);
    if (m->came != me->count) wrong++;
    wait_for_team(me);
    m->came--;
    if (me->number == 0) m->count = me->count;
}

static void count(int64_t item, void *of) { ((_Atomic int *)of)[item]++; }

static _Atomic int64_t most_met;

static void *call(void *times) {
    for (int64_t i = 0; i < (int64_t)(intptr_t)times; i++) {
        struct meeting m = {0};
        in_team(meet, &m);
        if (m.came || m.count < 1) wrong++;
        if (m.count > most_met) most_met = m.count;
        _Atomic int items[ITEMS] = {0};
        for_each(ITEMS, i % 2, count, items);
        for (int k = 0; k < ITEMS; k++) wrong += items[k] != 1;
    }
    return NULL;
}

int main(void) {
    pthread_t callers[THREADS];
    void *times = (void *)20;
    set_pool_threads(THREADS);
    call(times);
    if (uses_openmp() || most_met != THREADS) wrong++;
    for (int i = 0; i < THREADS; i++) pthread_create(callers + i, NULL, call, times);
    for (int i = 0; i < THREADS; i++) pthread_join(callers[i], NULL);
    pid_t child = fork();
    most_met = 0;
    call(times);
    if (most_met != THREADS) wrong++;
    if (!child) _exit(wrong != 0);
    int ended = 1;
    waitpid(child, &ended, 0);
    if (ended) puts("the child of the fork failed");
    return wrong || ended;
}
