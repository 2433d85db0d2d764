/* Threads, locks and symbols of the operating system, for team.c. */
#pragma once

#include <stdint.h>
#include <stdlib.h>

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
