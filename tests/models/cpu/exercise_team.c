/* Checks teams of the pool: every thread takes part and waits at the barrier; every item is computed once; concurrent
 * callers and the child of a fork get right results, also within `keep_team`; threads that wait long use little processor
 * time; items are taken once each, however slow a thread is, and a thread begins with its own share. With an argument it
 * checks teams of OpenMP instead, without the fork. Exits with 0 if all results are right. */
#include "team.h"

#include <pthread.h>
#include <stdio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

void set_pool_threads(int64_t threads);
int uses_openmp(void);

enum { THREADS = 3, ITEMS = 100, LATE = 200000 /* microseconds */ };

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

static void note_thread(int64_t item, void *of) { ((pthread_t *)of)[item] = pthread_self(); }

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
        pthread_t of_single_item;
        for_each(1, 1, note_thread, &of_single_item); /* needs no other thread */
        wrong += !pthread_equal(of_single_item, pthread_self());
    }
    return NULL;
}

static void call_often(void *times) { call(times); }

static void *call_kept(void *times) {
    keep_team(call_often, times);
    return call(times);
}

static void come_late(const struct member *me, void *of) {
    (void)of;
    if (me->number == 0) usleep(LATE);
    wait_for_team(me);
    if (me->number == 1) usleep(LATE);
}

/* First all but one thread wait at the barrier, then all but one wait for the end. */
static void call_late(void *of) {
    clock_t before = clock();
    in_team(come_late, of);
    double seconds = (double)(clock() - before) / CLOCKS_PER_SEC; /* of all threads */
    if (seconds < LATE / 20e6) return;
    wrong++;
    printf("threads that waited computed for %.3f s\n", seconds);
}

/* Every `slow`th of the threads takes nothing until the others have found nothing left. */
static void take_all(int64_t threads, int64_t items, int64_t slow) {
    int taken[ITEMS] = {0};
    int64_t tried[2 * SHARES] = {0};
    struct shares shares = {{0}};
    for (int late = 0; late < 2; late++)
        for (int64_t busy = 1; busy;) {
            busy = 0;
            for (int64_t number = 0; number < threads; number++) {
                struct member me = {number, threads, 0};
                if (!late && number % slow == 0) continue;
                int64_t first = tried[number] == 0, item = take_item(&me, &shares, items, tried + number);
                if (item == items) continue;
                if (item < 0 || item > items) { wrong++; return; }
                if (first && tried[number] == 0 && threads <= SHARES) /* its own share */
                    wrong += item < share_of(&me, items, number) || item >= share_of(&me, items, number + 1);
                taken[item]++, busy = 1;
            }
        }
    for (int64_t i = 0; i < items; i++) wrong += taken[i] != 1;
}

int main(int count_arguments, char **arguments) {
    (void)arguments;
    int64_t threads[] = {1, 2, 3, 5, 8, 16, 33, 64, 65, 128};
    for (int i = 0; i < 10; i++)
        for (int64_t items = 0; items <= ITEMS; items += 7)
            for (int64_t slow = 1; slow <= 3; slow++) take_all(threads[i], items, slow);
    pthread_t callers[THREADS];
    void *times = (void *)20;
    set_pool_threads(THREADS);
    call(times);
    if (uses_openmp() != (count_arguments > 1) || most_met != THREADS) wrong++;
    most_met = 0;
    keep_team(call_often, times);
    if (most_met != THREADS) wrong++;
    keep_team(call_late, NULL);
    for (int i = 0; i < THREADS; i++) pthread_create(callers + i, NULL, call_kept, times);
    for (int i = 0; i < THREADS; i++) pthread_join(callers[i], NULL);
    if (uses_openmp()) return wrong;
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
