#include "threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstdint>
#include <ctime>
#include <mutex>
#include <thread>

namespace quire {
namespace {

constexpr long MOST_HELPERS = 255;
constexpr int64_t WAKEFUL_NANOSECONDS = 15'000;  // a helper spins for so long after a loop, then sleeps
constexpr int LOOKS = 64;                        // looks at the loop's number between two looks at the clock
constexpr int MODESTY = 5;                       // what is added to the nice value of a helper

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int64_t nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

// The helpers of a process. A team is never destroyed: its threads end with the process.
class Team {
public:
    void run(long num_threads, void (*new_work)(void*), void* new_argument) {
        std::unique_lock<std::mutex> lock(busy, std::try_to_lock);
        if (!lock) return new_work(new_argument);  // the team is busy with an outer loop or with another thread's
        grow(std::min(num_threads - 1, MOST_HELPERS));
        work = new_work, argument = new_argument, limit = num_threads - 1;
        number.store(number.load() + 1);  // odd: a loop is open to helpers
        if (asleep.load()) syscall(SYS_futex, &number, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
        new_work(new_argument);
        number.store(number.load() + 1);  // even: no helper may join any more
        for (int looks = 0; inside.load();) {
            pause();
            if (++looks % LOOKS == 0) sched_yield();  // a helper that began a piece may be waiting for this core
        }
    }

    std::atomic<int> awake{0};

private:
    void grow(long count) {
        for (; num_helpers < count; num_helpers++)
            std::thread([this, index = num_helpers] { help(index); }).detach();
    }

    void help(long index) {
        // The frontend and the engine's event loop have little to do, and should do it at once. So helpers are nicer
        // than they are. On Linux a nice value belongs to one thread.
        setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + MODESTY);
        for (uint32_t done = 0;;) {
            const uint32_t now = wait_past(done);
            inside.fetch_add(1);
            // `run` waits for a helper that is inside before the number changes. A later helper sees another number.
            if (number.load() == now && index < limit) work(argument);
            inside.fetch_sub(1);
            done = now;
        }
    }

    // Waits for a loop other than `done`, and returns its number.
    uint32_t wait_past(uint32_t done) {
        int64_t deadline = nanoseconds() + WAKEFUL_NANOSECONDS;
        for (;;) {
            for (int look = 0; look < LOOKS; look++, pause()) {
                const uint32_t now = number.load();
                if (now % 2 && now != done) return now;
            }
            if (awake.load()) continue;
            if (nanoseconds() < deadline) continue;
            const uint32_t now = number.load();
            asleep.fetch_add(1);
            if (!(now % 2 && now != done))
                syscall(SYS_futex, &number, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0);
            asleep.fetch_sub(1);
            deadline = nanoseconds() + WAKEFUL_NANOSECONDS;
        }
    }

    std::mutex busy;
    long num_helpers = 0;
    alignas(64) std::atomic<uint32_t> number{0};
    void (*work)(void*) = nullptr;
    void* argument = nullptr;
    long limit = 0;
    alignas(64) std::atomic<int> inside{0};
    std::atomic<int> asleep{0};
};

std::atomic<Team*> the_team{nullptr};

// A forked process has none of its parent's threads.
void forget_team() { the_team.store(nullptr); }

Team& team() {
    if (Team* known = the_team.load()) return *known;
    static std::mutex making;
    static bool is_watching = false;
    std::lock_guard<std::mutex> lock(making);
    if (!is_watching) pthread_atfork(nullptr, nullptr, forget_team);
    is_watching = true;
    if (!the_team.load()) the_team.store(new Team);
    return *the_team.load();
}

}  // namespace

void run_team(long num_threads, void (*work)(void*), void* argument) { team().run(num_threads, work, argument); }

StayAwake::StayAwake() { team().awake.fetch_add(1); }
StayAwake::~StayAwake() { team().awake.fetch_sub(1); }

}  // namespace quire

// For the parts, which are libraries of their own (parts/team.cpp).
extern "C" void quire_run_team(long num_threads, void (*work)(void*), void* argument) {
    quire::run_team(num_threads, work, argument);
}
