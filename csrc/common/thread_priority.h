// Priority of a thread within this process.
#pragma once

#include <unistd.h>

namespace patrickstar {

// While no kernel is launched the device idles, so threads with long loops on the host give way to those that launch.
enum class ThreadPriority { kUsual, kBelowLaunches };

constexpr int kNiceBelowLaunches = 10;

// Lowers the calling thread's priority for good: nice values belong to threads on Linux. Ignores refusals.
inline void take_priority(ThreadPriority priority) {
  if (priority == ThreadPriority::kBelowLaunches) static_cast<void>(!nice(kNiceBelowLaunches));
}

}  // namespace patrickstar
