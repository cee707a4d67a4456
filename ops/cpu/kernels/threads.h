// Helper threads for loops. A helper that gets no core is not waited for.
//
// OpenMP ends a loop only when every thread has run. On a machine where other processes take a core now and then (the
// server's own frontend, its clients) that wait costs a time slice. Here each thread that runs takes pieces of the loop
// until none is left, and the calling thread waits only for pieces that have begun.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

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

// The indices below `count`, divided into consecutive shares of threads. A thread takes pieces from the front of its own
// share, so that its prefetches are its next reads. Then it takes pieces from the back of others' shares, whose threads may
// not be running.
class Shares {
public:
    Shares(long count, long num_shares)
        : num_shares(num_shares), piece(std::max(1L, count / (8 * num_shares))), shares(new Share[num_shares]) {
        for (long i = 0; i < num_shares; i++)
            shares[i].left = together(count * i / num_shares, count * (i + 1) / num_shares);
    }

    // Calls body(i) for pieces until none is left. Each thread of a team calls this.
    template <class Body> void take(Body& body) {
        const long own = num_threads.fetch_add(1) % num_shares;
        for (long i = 0; i < num_shares; i++) {
            std::atomic<uint64_t>& left = shares[(own + i) % num_shares].left;
            for (uint64_t now = left.load(); first_of(now) < end_of(now);) {
                const long first = first_of(now), end = end_of(now), size = std::min(piece, end - first);
                const long begin = i ? end - size : first;
                if (!left.compare_exchange_weak(now, i ? together(first, begin) : together(begin + size, end))) continue;
                for (long each = begin; each < begin + size; each++) body(each);
                now = left.load();
            }
        }
    }

private:
    struct alignas(64) Share {
        std::atomic<uint64_t> left;  // its first number, and in the upper half its end
    };
    static uint64_t together(long first, long end) { return (uint64_t)first | (uint64_t)end << 32; }
    static long first_of(uint64_t left) { return (long)(uint32_t)left; }
    static long end_of(uint64_t left) { return (long)(left >> 32); }

    const long num_shares, piece;
    const std::unique_ptr<Share[]> shares;
    std::atomic<long> num_threads{0};
};

// Calls body(i) once for each i in [0, count), in any order. count is below 2^32.
template <class Body> void for_each(long count, long num_threads, Body body) {
    if (num_threads <= 1 || count <= 1) {
        for (long i = 0; i < count; i++) body(i);
        return;
    }
    Shares shares(count, std::min(num_threads, count));
    in_team(num_threads, [&] { shares.take(body); });
}

}  // namespace quire
