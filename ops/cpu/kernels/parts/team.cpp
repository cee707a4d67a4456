// The helper threads of a part: those of the main library, which the loader passes on. A process has one team.

#include "threads.h"

namespace quire {
namespace {

void (*team)(long, void (*)(void*), void*) = nullptr;

}  // namespace

void run_team(long num_threads, void (*work)(void*), void* argument) {
    if (!team) return work(argument);  // loaded without the main library
    team(num_threads, work, argument);
}

}  // namespace quire

// `run` is the main library's quire_run_team.
extern "C" void quire_join_team(void (*run)(long, void (*)(void*), void*)) { quire::team = run; }
