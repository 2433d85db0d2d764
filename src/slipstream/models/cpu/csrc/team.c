/* Teams by OpenMP's functions, found in the process, or by a pool of threads.
 *
 * A thread that waits first spins for a moment, which costs least while all threads run, and then sleeps: if other
 * programs want the cores, or there are more threads than cores, spinning threads would keep working ones off the
 * cores. While one caller uses the pool, others compute alone. A forward calls OpenMP's threads some hundred times.
 * Between these calls they stand ready (`keep_team`), since OpenMP takes half a microsecond to start a team of two, and
 * more for each further thread.
 */
#if !defined(_WIN32)
#define _GNU_SOURCE /* RTLD_DEFAULT */
#endif

#include "team.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Threads, locks and symbols of the operating system. */
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
static inline void relax(void) { _mm_pause(); }
#elif defined(__aarch64__)
static inline void relax(void) { __asm__ volatile("yield"); }
#else
static inline void relax(void) {}
#endif

enum { THREAD_STACK = 4 << 20 }; /* bytes; attention needs one, more than some systems give a thread */

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
    HANDLE thread = CreateThread(NULL, THREAD_STACK, begin_thread, start, STACK_SIZE_PARAM_IS_A_RESERVATION, NULL);
    if (thread) CloseHandle(thread);
    return thread != NULL;
}
#else
#include <dlfcn.h>
#include <pthread.h>
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
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes)) return 0;
    pthread_attr_setstacksize(&attributes, THREAD_STACK);
    int failed = pthread_create(&thread, &attributes, begin_thread, start);
    pthread_attr_destroy(&attributes);
    if (!failed) pthread_detach(thread);
    return !failed;
}
#endif

/* Starts a thread that calls the function with this number; returns whether it has started. */
static inline int start_thread(thread_function *function, int64_t number) {
    struct start *start = malloc(sizeof *start);
    if (!start) return 0;
    *start = (struct start){function, number};
    if (create_thread(start)) return 1;
    free(start);
    return 0;
}

enum { MAX_THREADS = 64, SPINS = 4000 /* before a thread sleeps; none if there are more threads than cores */ };

struct call {
    team_function *function;
    void *of;
};

/* The functions of OpenMP, NULL if the process has none. Names and types are those of GCC's library, which LLVM's and
 * Intel's have, too. */
static struct {
    void (*parallel)(void (*function)(void *), void *data, unsigned threads, unsigned flags);
    void (*barrier)(void);
    int (*number)(void), (*count)(void), (*next_count)(void), (*processors)(void);
} openmp;

/* A number whose change threads wait for, in a cache line of its own, and how many of them sleep until then. */
struct watched {
    _Alignas(64) _Atomic int64_t number, sleeping;
    system_condition changed;
};

/* Threads that compute together whenever one of them, the caller, begins a call. size: how many they are, with the
 * caller; spins: before one of them sleeps; calls: how many have begun so far; running: threads other than the caller
 * that still compute; arrived: threads at the barrier; passed: barriers passed so far. */
struct crew {
    struct call call;
    int64_t size, spins;
    system_lock lock;
    struct watched calls, running, passed;
    _Alignas(64) _Atomic int64_t arrived;
};

#define NEW_WATCHED {.changed = SYSTEM_CONDITION}
#define NEW_CREW {.size = 1, .lock = SYSTEM_LOCK, .calls = NEW_WATCHED, .running = NEW_WATCHED, .passed = NEW_WATCHED}

static struct {
    struct crew crew;
    _Atomic int busy;
    int64_t wanted;
} pool = {.crew = NEW_CREW};

/* The crew to which this thread belongs at the moment, and the crew that stands ready for its calls. */
static _Thread_local struct crew *own_crew, *ready_crew;

static system_once once = SYSTEM_ONCE;

static void in_openmp(void *given) {
    const struct call *call = given;
    struct member me = {openmp.number(), openmp.count(), openmp.barrier};
    call->function(&me, call->of);
}

static int64_t spins_of(int64_t threads, int64_t processors) { return threads > processors ? 0 : SPINS; }

/* Returns when a number is no longer the value or, if `becomes`, when it is. */
static void wait_for_change(struct crew *crew, struct watched *of, int64_t value, int becomes) {
    for (int64_t spin = 0; spin < crew->spins; spin++) {
        if ((atomic_load(&of->number) == value) == becomes) return;
        relax();
    }
    take_lock(&crew->lock);
    atomic_fetch_add(&of->sleeping, 1);
    while ((atomic_load(&of->number) == value) != becomes) wait_on(&of->changed, &crew->lock);
    atomic_fetch_sub(&of->sleeping, 1);
    give_lock(&crew->lock);
}

/* Wakes the threads that sleep until a number changes; to be called after the change. A thread that is about to sleep
 * either sees the change or is counted already. */
static void wake(struct crew *crew, struct watched *of) {
    if (!atomic_load(&of->sleeping)) return;
    take_lock(&crew->lock);
    wake_all(&of->changed);
    give_lock(&crew->lock);
}

static void wait_in_crew(void) {
    struct crew *crew = own_crew;
    int64_t passed = atomic_load(&crew->passed.number);
    if (atomic_fetch_add(&crew->arrived, 1) + 1 < crew->size) {
        wait_for_change(crew, &crew->passed, passed, 0);
        return;
    }
    atomic_store(&crew->arrived, 0);
    atomic_fetch_add(&crew->passed.number, 1);
    wake(crew, &crew->passed);
}

static void take_part(struct crew *crew, int64_t number) {
    struct member me = {number, crew->size, wait_in_crew};
    own_crew = crew;
    crew->call.function(&me, crew->call.of);
}

static void begin_call(struct crew *crew, const struct call *call) {
    crew->call = *call;
    atomic_store(&crew->running.number, crew->size - 1);
    atomic_fetch_add(&crew->calls.number, 1);
    wake(crew, &crew->calls);
}

/* Computes this thread's part, and returns when all others are done. */
static void end_call(struct crew *crew) {
    take_part(crew, 0);
    wait_for_change(crew, &crew->running, 0, 1);
}

/* Takes part in one call after another, until one has no function. */
static void answer_calls(struct crew *crew, int64_t number) {
    for (int64_t seen = 0;; seen++) {
        wait_for_change(crew, &crew->calls, seen, 0);
        if (!crew->call.function) return;
        take_part(crew, number);
        if (atomic_fetch_sub(&crew->running.number, 1) == 1) wake(crew, &crew->running);
    }
}

static void work_in_pool(int64_t number) { answer_calls(&pool.crew, number); }

/* For the child of a fork, which has none of the threads. */
static void forget_threads(void) {
    static const struct crew crew = NEW_CREW;
    memcpy(&pool.crew, &crew, sizeof crew);
    atomic_store(&pool.busy, 0);
}

static void prepare(void) {
    *(void **)&openmp.parallel = symbol_of_process("GOMP_parallel");
    *(void **)&openmp.barrier = symbol_of_process("GOMP_barrier");
    *(void **)&openmp.number = symbol_of_process("omp_get_thread_num");
    *(void **)&openmp.count = symbol_of_process("omp_get_num_threads");
    *(void **)&openmp.next_count = symbol_of_process("omp_get_max_threads");
    *(void **)&openmp.processors = symbol_of_process("omp_get_num_procs");
    if (!openmp.barrier || !openmp.number || !openmp.count || !openmp.next_count || !openmp.processors) openmp.parallel = 0;
    if (!pool.wanted) pool.wanted = count_processors();
    after_fork(forget_threads);
}

/* Sets the number of the pool's threads; to be called before the first team. OpenMP has a number of its own. */
void set_pool_threads(int64_t threads) { pool.wanted = threads < 1 ? 1 : threads; }

/* Whether teams are OpenMP's. */
int uses_openmp(void) {
    run_once(&once, prepare);
    return openmp.parallel != 0;
}

static void in_pool(const struct call *call) {
    struct crew *crew = &pool.crew;
    if (!atomic_load(&crew->calls.number)) {
        int64_t threads = least(pool.wanted, MAX_THREADS);
        crew->spins = spins_of(threads, count_processors());
        while (crew->size < threads && start_thread(work_in_pool, crew->size)) crew->size++;
    }
    begin_call(crew, call);
    end_call(crew);
}

void in_team(team_function *function, void *of) {
    struct call call = {function, of};
    if (ready_crew) {
        begin_call(ready_crew, &call);
        end_call(ready_crew);
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

/* What `keep_team` calls, and the crew that stands ready meanwhile. */
struct kept_team {
    struct crew crew;
    void (*function)(void *of);
    void *of;
};

static void call_or_stand_ready(const struct member *me, void *given) {
    struct kept_team *team = given;
    struct crew *crew = &team->crew;
    if (me->number > 0) {
        answer_calls(crew, me->number);
        return;
    }
    crew->size = me->count;
    ready_crew = crew;
    team->function(team->of);
    ready_crew = NULL;
    begin_call(crew, &(struct call){NULL, NULL}); /* the last one, after which the threads leave */
}

void keep_team(void (*function)(void *of), void *of) {
    if (!uses_openmp() || ready_crew) {
        function(of);
        return;
    }
    struct kept_team team = {.crew = NEW_CREW, .function = function, .of = of};
    team.crew.spins = spins_of(openmp.next_count(), openmp.processors());
    in_team(call_or_stand_ready, &team);
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
    if (shared && count > 1) in_team(share_items, &items);
    else share_items(&alone, &items);
}
