// Calls kernels from a list, so that a whole step of a model is one call from Python.

#include "kernels.h"
#include "threads.h"

#include <cstring>
#include <ctime>
#include <utility>

namespace quire {
namespace {

// An argument of any kind, as Python wrote it down.
union Word {
    long integer;
    double number;
    void* pointer;
};

template <class T> T argument(Word word) {
    if constexpr (std::is_pointer_v<T>) return (T)word.pointer;
    else if constexpr (std::is_same_v<T, double>) return word.number;
    else return word.integer;
}

template <auto FUNCTION> struct Unpack;

template <class... A, int (*FUNCTION)(A...)> struct Unpack<FUNCTION> {
    template <size_t... I> static int with(const Word* words, std::index_sequence<I...>) {
        return FUNCTION(argument<A>(words[I])...);
    }
    static int call(const Word* words) { return with(words, std::index_sequence_for<A...>()); }
};

struct Kernel {
    const char* name;
    int (*call)(const Word* words);
};

#define QUIRE_KERNEL(name) {#name, Unpack<&name>::call}
constexpr Kernel KERNELS[] = {
    QUIRE_KERNEL(quire_attention),    QUIRE_KERNEL(quire_linear),      QUIRE_KERNEL(quire_take_rows),
    QUIRE_KERNEL(quire_rotation),     QUIRE_KERNEL(quire_rms_norm),    QUIRE_KERNEL(quire_add_rms_norm),
    QUIRE_KERNEL(quire_rotary),       QUIRE_KERNEL(quire_silu_and_mul), QUIRE_KERNEL(quire_write_cache),
    QUIRE_KERNEL(quire_rotate_and_store), QUIRE_KERNEL(quire_draw),    QUIRE_KERNEL(quire_likeliest),
    QUIRE_KERNEL(quire_apply_bitmask),
};
#undef QUIRE_KERNEL

}  // namespace

// Mirrored in `quire.ops.cpu.launches`.
struct Launch {
    const Kernel* kernel;
    const Word* arguments;
};

}  // namespace quire

using namespace quire;

// Where the kernel of this name is found in a Launch; null if it is not a kernel that can be listed.
extern "C" const void* quire_find_kernel(const char* name) {
    for (const Kernel& kernel : KERNELS)
        if (!std::strcmp(kernel.name, name)) return &kernel;
    return nullptr;
}

// Runs `count` launches in order. `ends`, unless it is null, takes the CLOCK_MONOTONIC seconds at which each was done.
// Returns 0, or the number, from 1, of the launch that failed; those after it are not run.
extern "C" long quire_run(const Launch* launches, long count, double* ends) {
    const StayAwake helpers;
    for (long i = 0; i < count; i++) {
        if (launches[i].kernel->call(launches[i].arguments)) return i + 1;
        if (!ends) continue;
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        ends[i] = now.tv_sec + now.tv_nsec * 1e-9;
    }
    return 0;
}
