/* Threads that work on a task together: those of the process's OpenMP, which PyTorch has loaded, so that both share one
 * set of threads; without it, a small pool of our own. */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* A thread of a team: its number, and how many there are. */
struct member {
    int64_t number, count;
    void (*wait)(void);
};

typedef void team_function(const struct member *me, void *of);
typedef void item_function(int64_t item, void *of);

/* Calls the function in every thread of a team; returns when all calls have returned. */
void in_team(team_function *function, void *of);

/* Calls the function in this thread only. Other threads stay ready until it returns, so its teams start faster. */
void keep_team(void (*function)(void *of), void *of);

/* Calls the function for items 0 to count - 1, in every thread of a team or, unless `shared`, in this one only. */
void for_each(int64_t count, int shared, item_function *function, void *of);

/* Waits until every thread of the team has reached this call. */
static inline void wait_for_team(const struct member *me) {
    if (me->count > 1) me->wait();
}

/* The items of `count` that are a thread's share: from `share_of(number)` to `share_of(number + 1)`. */
static inline int64_t share_of(const struct member *me, int64_t count, int64_t number) {
    return count * number / me->count;
}

/* Takes the next of the items that all threads take from one counter; returns its number. */
static inline int64_t take(_Atomic int64_t *next) { return atomic_fetch_add_explicit(next, 1, memory_order_relaxed); }

/* The number of items taken from each thread's share; zeros at first. Threads take items from their own share first, then
 * from others'. So a slow core, or a thread that waits for its core, does not set the pace, and threads mostly read the
 * same memory in every forward. */
enum { SHARES = 64, HANDED_OUT = 65536 /* bytes of panels in an item, unless there are few panels */ };
struct shares {
    _Alignas(64) _Atomic int64_t taken[SHARES];
};

/* How many of `count` units of so many bytes are one item: never more than an eighth of a thread's share. */
static inline int64_t taken_together(const struct member *me, int64_t bytes, int64_t count) {
    int64_t units = least(HANDED_OUT / bytes, count / (8 * me->count));
    return units < 1 ? 1 : units;
}

/* Takes one of `count` items; returns its number, or `count` if all are taken. tried: how many shares are empty,
 * counted from the thread's own. */
static inline int64_t take_item(const struct member *me, struct shares *of, int64_t count, int64_t *tried) {
    int64_t shares = least(me->count, SHARES);
    for (; *tried < shares; ++*tried) {
        int64_t share = (me->number + *tried) % shares, first = count * share / shares, size = count * (share + 1) / shares - first;
        _Atomic int64_t *taken = of->taken + share * (SHARES / shares); /* apart: if few, in cache lines of their own */
        if (*tried && atomic_load_explicit(taken, memory_order_relaxed) >= size) continue;
        int64_t item = take(taken);
        if (item < size) return first + item;
    }
    return count;
}
