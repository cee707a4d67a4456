// Threads that help with a loop if they have a core to themselves, and are not waited for if not.
//
// OpenMP's end of a loop waits until every thread has had its turn. On a machine where other processes take a core now and
// then (the server's own frontend, its clients) that costs a time slice. Here whoever comes takes the next piece, and the
// calling thread waits only for pieces that somebody has begun.
#pragma once

#include <algorithm>
#include <atomic>
#include <utility>

namespace quire {

// work(argument) on the calling thread and on up to num_threads - 1 others, at once; back when all that came are done.
// Each call of work must take pieces from a common stock until it is empty. A call within a call has one thread.
void run_team(long num_threads, void (*work)(void*), void* argument);

// While one lives, helping threads wait for the next loop without going to sleep.
struct StayAwake {
    StayAwake();
    ~StayAwake();
};

template <class Work> void in_team(long num_threads, Work work) {
    if (num_threads <= 1) return work();
    run_team(num_threads, [](void* body) { (*static_cast<Work*>(body))(); }, &work);
}

// body(i) for i in [0, count), each once, in any order.
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
