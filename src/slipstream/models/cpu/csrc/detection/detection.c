/* Asks an x86 processor for its name and instructions, on systems that do not list them: those that it has and whose
 * registers the operating system saves, by the names of Linux's /proc/cpuinfo. Compiled for any x86-64 processor. */
#include <cpuid.h>
#include <stdint.h>
#include <string.h>

struct bit {
    const char *name;
    unsigned leaf, subleaf, which, place, saved; /* which: register, EAX to EDX; saved: states the system must save */
};

enum { EAX, EBX, ECX, EDX };
enum { AVX_STATE = 0x06, AVX512_STATE = 0xe6 };

static const struct bit BITS[] = {
    {"fma", 1, 0, ECX, 12, AVX_STATE},           {"f16c", 1, 0, ECX, 29, AVX_STATE},
    {"avx2", 7, 0, EBX, 5, AVX_STATE},           {"avx_vnni", 7, 1, EAX, 4, AVX_STATE},
    {"avx512f", 7, 0, EBX, 16, AVX512_STATE},    {"avx512dq", 7, 0, EBX, 17, AVX512_STATE},
    {"avx512bw", 7, 0, EBX, 30, AVX512_STATE},   {"avx512vl", 7, 0, EBX, 31, AVX512_STATE},
    {"avx512_vnni", 7, 0, ECX, 11, AVX512_STATE}, {"avx512_bf16", 7, 1, EAX, 5, AVX512_STATE},
};

static int ask(unsigned leaf, unsigned subleaf, unsigned of[4]) {
    memset(of, 0, 4 * sizeof *of);
    return __get_cpuid_count(leaf, subleaf, of, of + 1, of + 2, of + 3);
}

/* The states that the system saves: XCR0, 0 where it cannot be read. */
static unsigned saved_states(void) {
    unsigned of[4], low, high;
    if (!ask(1, 0, of) || !(of[ECX] >> 27 & 1)) return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

/* name: at least 49 bytes; flags: at least 256, names with spaces between them. */
#ifdef _WIN32
__declspec(dllexport)
#endif
void describe_processor(char *name, char *flags) {
    unsigned of[4], saved = saved_states();
    memset(name, 0, 49), *flags = 0;
    for (unsigned i = 0; i < 3; i++)
        if (ask(0x80000002 + i, 0, of)) memcpy(name + 16 * i, of, 16);
    for (unsigned i = 0; i < sizeof BITS / sizeof *BITS; i++) {
        const struct bit *bit = BITS + i;
        if (!ask(bit->leaf, bit->subleaf, of) || !(of[bit->which] >> bit->place & 1)) continue;
        if ((saved & bit->saved) != bit->saved) continue;
        if (*flags) strcat(flags, " ");
        strcat(flags, bit->name);
    }
}
