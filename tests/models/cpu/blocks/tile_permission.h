/* A program has to ask Linux for the registers of AMX, as processor.py does. */
#pragma once

#ifdef __AMX_TILE__
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

static inline void ask_for_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    if (!syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)) return;
    perror("tiles");
    exit(1);
}
#else
static inline void ask_for_tiles(void) {}
#endif
