// Helper threads for loops. A helper that gets no core is not waited for.
//
// OpenMP ends a loop only when every thread has run. On a machine where other processes take a core now and then (the
// server's own frontend, its clients) that wait costs a time slice. Here each thread that runs takes the next piece of
// the loop, and the calling thread waits only for pieces that have begun.
#pragma once

#include <algorithm>
#include <atomic>
#include <utility>

namespace quire {

// Calls work(argument) on the calling thread and, at the same time, on up to num_threads - 1 helpers. Returns when all
// helpers that began are done. Each call of work must take pieces of a common loop until none is left. A nested call
// runs on one thread.
void run_team(long num_threads, void (*work)(void*), void* argument);

// While an object of this class exists, helpers spin between loops and do not sleep.
struct StayAwake {
    StayAwake();
    ~StayAwake();
};

template <class Work> void in_team(long num_threads, Work work) {
    if (num_threads <= 1) return work();
    run_team(num_threads, [](void* body) { (*static_cast<Work*>(body))(); }, &work);
}

// Calls body(i) once for each i in [0, count), in any order.
template <class Body> void for_each(long count, long num_threads, Body body) {
    if (num_threads <= 1 || count <= 1) {
        for (long i = 0; i < count; i++) body(i);
        return;
    }
    const long piece = std::max(1L, count / (4 * num_threads));
    std::atomic<long> taken{0};
    in_team(num_threads, [&] {
        for (long first; (first = taken.fetch_add(piece)) < count;)
            for (long i = first; i < std::min(first + piece, count); i++) body(i);
    });
}

}  // namespace quire
