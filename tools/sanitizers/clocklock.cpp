// Preloaded with ThreadSanitizer. Before GCC 13 it does not intercept pthread_mutex_clocklock, so it misses timed locks
// of std::timed_mutex and reports their release. This forwards to pthread_mutex_timedlock, which it intercepts.
#include <pthread.h>
#include <time.h>

extern "C" __attribute__((visibility("default"))) int pthread_mutex_clocklock(pthread_mutex_t* mutex, clockid_t clock,
                                                                              const timespec* deadline) noexcept {
  constexpr long kNanoseconds = 1'000'000'000;
  timespec now{}, until{};
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += deadline->tv_sec - now.tv_sec;
  until.tv_nsec += deadline->tv_nsec - now.tv_nsec;
  if (until.tv_nsec >= kNanoseconds) {
    until.tv_nsec -= kNanoseconds;
    ++until.tv_sec;
  } else if (until.tv_nsec < 0) {
    until.tv_nsec += kNanoseconds;
    --until.tv_sec;
  }
  return pthread_mutex_timedlock(mutex, &until);
}
