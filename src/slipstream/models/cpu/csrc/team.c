/* Teams by OpenMP's functions, found in the process, or by a pool of threads.
 *
 * A thread of the pool that has nothing to do looks for work for a moment and then sleeps. While one caller uses the
 * pool, others compute alone. OpenMP's threads are called some hundred times a forward: they stand ready meanwhile, since
 * it takes OpenMP half a microsecond to start a team of two, and more for each further thread.
 */
#if !defined(_WIN32)
#define _GNU_SOURCE /* RTLD_DEFAULT */
#endif

#include "team.h"

#include <stdint.h>
#include <stdlib.h>

/* Threads, locks and symbols of the operating system. */
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
static inline void relax(void) { _mm_pause(); }
#elif defined(__aarch64__)
static inline void relax(void) { __asm__ volatile("yield"); }
#else
static inline void relax(void) {}
#endif

typedef void thread_function(int64_t number);
struct start {
    thread_function *function;
    int64_t number;
};

static inline void call_given(void *given) {
    struct start start = *(struct start *)given;
    free(given);
    start.function(start.number);
}

#ifdef _WIN32
#include <windows.h>

typedef SRWLOCK system_lock;
typedef CONDITION_VARIABLE system_condition;
typedef INIT_ONCE system_once;
#define SYSTEM_LOCK SRWLOCK_INIT
#define SYSTEM_CONDITION CONDITION_VARIABLE_INIT
#define SYSTEM_ONCE INIT_ONCE_STATIC_INIT

static inline void take_lock(system_lock *lock) { AcquireSRWLockExclusive(lock); }
static inline void give_lock(system_lock *lock) { ReleaseSRWLockExclusive(lock); }
static inline void wait_on(system_condition *condition, system_lock *lock) {
    SleepConditionVariableSRW(condition, lock, INFINITE, 0);
}
static inline void wake_all(system_condition *condition) { WakeAllConditionVariable(condition); }
static inline void yield_to_others(void) { SwitchToThread(); }
static inline void *symbol_of_process(const char *name) { /* PyTorch's OpenMP is Microsoft's or Intel's here */
    (void)name;
    return NULL;
}
static inline void after_fork(void (*function)(void)) { (void)function; }
static inline int64_t count_processors(void) {
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return (int64_t)info.dwNumberOfProcessors;
}
static BOOL CALLBACK run_given(PINIT_ONCE once, PVOID function, PVOID *context) {
    (void)once, (void)context;
    ((void (*)(void))function)();
    return TRUE;
}
static inline void run_once(system_once *once, void (*function)(void)) {
    InitOnceExecuteOnce(once, run_given, (PVOID)function, NULL);
}
static DWORD WINAPI begin_thread(LPVOID given) {
    call_given(given);
    return 0;
}
static inline int create_thread(struct start *start) {
    HANDLE thread = CreateThread(NULL, 0, begin_thread, start, 0, NULL);
    if (thread) CloseHandle(thread);
    return thread != NULL;
}
#else
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

typedef pthread_mutex_t system_lock;
typedef pthread_cond_t system_condition;
typedef pthread_once_t system_once;
#define SYSTEM_LOCK PTHREAD_MUTEX_INITIALIZER
#define SYSTEM_CONDITION PTHREAD_COND_INITIALIZER
#define SYSTEM_ONCE PTHREAD_ONCE_INIT

static inline void take_lock(system_lock *lock) { pthread_mutex_lock(lock); }
static inline void give_lock(system_lock *lock) { pthread_mutex_unlock(lock); }
static inline void wait_on(system_condition *condition, system_lock *lock) { pthread_cond_wait(condition, lock); }
static inline void wake_all(system_condition *condition) { pthread_cond_broadcast(condition); }
static inline void yield_to_others(void) { sched_yield(); }
static inline void *symbol_of_process(const char *name) { return dlsym(RTLD_DEFAULT, name); }
static inline void after_fork(void (*function)(void)) { pthread_atfork(NULL, NULL, function); }
static inline int64_t count_processors(void) { return (int64_t)sysconf(_SC_NPROCESSORS_ONLN); }
static inline void run_once(system_once *once, void (*function)(void)) { pthread_once(once, function); }
static void *begin_thread(void *given) {
    call_given(given);
    return NULL;
}
static inline int create_thread(struct start *start) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, begin_thread, start)) return 0;
    pthread_detach(thread);
    return 1;
}
#endif

/* Whether a thread was started that calls the function with this number. */
static inline int start_thread(thread_function *function, int64_t number) {
    struct start *start = malloc(sizeof *start);
    if (!start) return 0;
    *start = (struct start){function, number};
    if (create_thread(start)) return 1;
    free(start);
    return 0;
}

enum { MOST = 64 /* threads */, LOOKS = 4000 /* for work, before a thread sleeps or lets others run */ };

struct call {
    team_function *function;
    void *of;
};

/* The functions of OpenMP, NULL where the process has none. Names and types are those of GCC's library, which LLVM's
 * and Intel's have too. */
static struct {
    void (*parallel)(void (*function)(void *), void *data, unsigned threads, unsigned flags);
    void (*barrier)(void);
    int (*number)(void), (*count)(void);
} openmp;

/* Threads that one of them calls. calls: so far; running: of them, those at work; arrived, passed: threads at the barrier,
 * and barriers passed; size: the caller included. Each in a line of its own, as all threads look at one or another. */
struct crew {
    struct call call;
    int64_t size;
    _Alignas(64) _Atomic int64_t calls;
    _Alignas(64) _Atomic int64_t running;
    _Alignas(64) _Atomic int64_t arrived;
    _Alignas(64) _Atomic int64_t passed;
};

static struct {
    system_lock lock;
    system_condition wake;
    struct crew crew;
    _Atomic int busy, sleeping;
    int64_t wanted;
} pool = {.lock = SYSTEM_LOCK, .wake = SYSTEM_CONDITION, .crew.size = 1};

/* The crew that a thread is of at the moment, and the one that it may call. */
static _Thread_local struct crew *own_crew, *standing;

static system_once once = SYSTEM_ONCE;

static int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }

static void in_openmp(void *given) {
    const struct call *call = given;
    struct member me = {openmp.number(), openmp.count(), openmp.barrier};
    call->function(&me, call->of);
}

/* Lets time pass between two looks. */
static void pause_at(int64_t look) {
    if (look < LOOKS) relax();
    else yield_to_others();
}

static void wait_in_crew(void) {
    struct crew *crew = own_crew;
    int64_t passed = atomic_load(&crew->passed);
    if (atomic_fetch_add(&crew->arrived, 1) + 1 == crew->size) {
        atomic_store(&crew->arrived, 0);
        atomic_fetch_add(&crew->passed, 1);
        return;
    }
    for (int64_t look = 0; atomic_load(&crew->passed) == passed; look++) pause_at(look);
}

static void take_part(struct crew *crew, int64_t number) {
    struct member me = {number, crew->size, wait_in_crew};
    own_crew = crew;
    crew->call.function(&me, crew->call.of);
}

static void begin_call(struct crew *crew, const struct call *call) {
    crew->call = *call;
    atomic_store(&crew->running, crew->size - 1);
    atomic_fetch_add(&crew->calls, 1);
}

/* Takes part, and returns when all others are done. */
static void end_call(struct crew *crew) {
    take_part(crew, 0);
    for (int64_t look = 0; atomic_load(&crew->running); look++) pause_at(look);
}

/* Returns when there have been more calls of the pool than `seen`. */
static void sleep_until_called(int64_t seen) {
    for (int64_t look = 0; look < LOOKS; look++) {
        if (atomic_load(&pool.crew.calls) != seen) return;
        relax();
    }
    take_lock(&pool.lock);
    atomic_fetch_add(&pool.sleeping, 1);
    while (atomic_load(&pool.crew.calls) == seen) wait_on(&pool.wake, &pool.lock);
    atomic_fetch_sub(&pool.sleeping, 1);
    give_lock(&pool.lock);
}

static void work(int64_t number) {
    for (int64_t seen = 0;; seen++) {
        sleep_until_called(seen);
        take_part(&pool.crew, number);
        atomic_fetch_sub(&pool.crew.running, 1);
    }
}

/* A child of a fork has none of the threads. */
static void forget_threads(void) {
    static const system_lock lock = SYSTEM_LOCK;
    static const system_condition wake = SYSTEM_CONDITION;
    pool.lock = lock, pool.wake = wake, pool.crew.size = 1;
    atomic_store(&pool.busy, 0), atomic_store(&pool.sleeping, 0), atomic_store(&pool.crew.calls, 0);
    atomic_store(&pool.crew.arrived, 0), atomic_store(&pool.crew.passed, 0); /* the fork may come between two arrivals */
}

static void prepare(void) {
    *(void **)&openmp.parallel = symbol_of_process("GOMP_parallel");
    *(void **)&openmp.barrier = symbol_of_process("GOMP_barrier");
    *(void **)&openmp.number = symbol_of_process("omp_get_thread_num");
    *(void **)&openmp.count = symbol_of_process("omp_get_num_threads");
    if (!openmp.barrier || !openmp.number || !openmp.count) openmp.parallel = 0;
    if (!pool.wanted) pool.wanted = count_processors();
    after_fork(forget_threads);
}

/* How many threads the pool will have, if called before the first team. OpenMP has a number of its own. */
void set_pool_threads(int64_t threads) { pool.wanted = threads < 1 ? 1 : threads; }

/* Whether teams are OpenMP's. */
int uses_openmp(void) {
    run_once(&once, prepare);
    return openmp.parallel != 0;
}

static void in_pool(const struct call *call) {
    struct crew *crew = &pool.crew;
    if (!atomic_load(&crew->calls))
        while (crew->size < least_of(pool.wanted, MOST) && start_thread(work, crew->size)) crew->size++;
    begin_call(crew, call);
    if (atomic_load(&pool.sleeping)) {
        take_lock(&pool.lock);
        wake_all(&pool.wake);
        give_lock(&pool.lock);
    }
    end_call(crew);
}

void in_team(team_function *function, void *of) {
    struct call call = {function, of};
    if (standing) {
        begin_call(standing, &call);
        end_call(standing);
        return;
    }
    if (uses_openmp()) {
        openmp.parallel(in_openmp, &call, 0, 0);
        return;
    }
    int free = 0;
    if (pool.wanted > 1 && atomic_compare_exchange_strong(&pool.busy, &free, 1)) {
        in_pool(&call);
        atomic_store(&pool.busy, 0);
    } else {
        struct member me = {0, 1, 0};
        function(&me, of);
    }
}

struct stand {
    struct crew crew;
    void (*function)(void *of);
    void *of;
};

static void stand_ready(const struct member *me, void *given) {
    struct stand *stand = given;
    struct crew *crew = &stand->crew;
    if (me->number == 0) {
        crew->size = me->count;
        standing = crew;
        stand->function(stand->of);
        standing = NULL;
        begin_call(crew, &(struct call){NULL, NULL}); /* the last one */
        return;
    }
    for (int64_t seen = 0;; seen++) {
        for (int64_t look = 0; atomic_load(&crew->calls) == seen; look++) pause_at(look);
        if (!crew->call.function) return;
        take_part(crew, me->number);
        atomic_fetch_sub(&crew->running, 1);
    }
}

void keep_team(void (*function)(void *of), void *of) {
    struct stand stand = {.function = function, .of = of};
    if (uses_openmp() && !standing) in_team(stand_ready, &stand);
    else function(of);
}

struct items {
    int64_t count;
    item_function *function;
    void *of;
};

static void share_items(const struct member *me, void *given) {
    const struct items *items = given;
    int64_t last = share_of(me, items->count, me->number + 1);
    for (int64_t i = share_of(me, items->count, me->number); i < last; i++) items->function(i, items->of);
}

void for_each(int64_t count, int shared, item_function *function, void *of) {
    struct items items = {count, function, of};
    struct member alone = {0, 1, 0};
    if (shared) in_team(share_items, &items);
    else share_items(&alone, &items);
}
