/* A host's wall clock for the programs that it is preloaded into: the machine's, and as much more as the first eight bytes
 * of the file in DRAINPIPE_LAB_CLOCK say, in seconds. Clocks since boot are the machine's. Nothing in Rust or SQLite waits
 * until a wall-clock time, so waits are left alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const int64_t none = 0;
static const volatile int64_t *ahead_s = &none;
static int (*machine_clock)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    machine_clock = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    const char *path = getenv("DRAINPIPE_LAB_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *mapped = mmap(NULL, sizeof *ahead_s, PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED)
        ahead_s = mapped;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!machine_clock)
        begin();
    int failed = machine_clock(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *ahead_s;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME_COARSE, &precise);
    if (now)
        *now = precise.tv_sec;
    return precise.tv_sec;
}
