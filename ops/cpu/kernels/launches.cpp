// Runs a list of kernels, so that a whole step of a model is one call from Python.

#include "threads.h"

#include <ctime>

namespace quire {

// `_Launch` in `quire.ops.cpu.launches`. Every kernel has this type: it takes one pointer and returns an int.
struct Launch {
    int (*kernel)(const void* call);
    const void* call;
};

}  // namespace quire

using namespace quire;

// Runs `count` launches in order. `ends`, unless null, receives the CLOCK_MONOTONIC time in seconds at which each was
// done. Returns 0, or the number (from 1) of the launch that failed; later launches are then not run.
extern "C" long quire_run(const Launch* launches, long count, double* ends) {
    const StayAwake helpers;
    for (long i = 0; i < count; i++) {
        if (launches[i].kernel(launches[i].call)) return i + 1;
        if (!ends) continue;
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        ends[i] = now.tv_sec + now.tv_nsec * 1e-9;
    }
    return 0;
}
