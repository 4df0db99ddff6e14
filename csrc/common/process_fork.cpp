#include "common/process_fork.h"

#include <pthread.h>

#include <atomic>

namespace patrickstar {

namespace {

std::atomic<uint64_t> num_forks{0};

void count_fork() { num_forks.fetch_add(1, std::memory_order_relaxed); }

// Registered when the extension is loaded, before any object of it can be forked.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, &count_fork);

}  // namespace

ProcessFork ProcessFork::current() { return ProcessFork(num_forks.load(std::memory_order_relaxed)); }

}  // namespace patrickstar
