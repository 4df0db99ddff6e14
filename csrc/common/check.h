// Exceptions of the core, and the macro that throws them.
//
// Messages name the subject, the value, the limit and the remedy:
//   PS_CHECK(bytes <= room, MemoryBudgetError, "chunk ", id, " needs ", show_exactly(bytes),
//            " on the device, ", show_exactly(room), " are left; raise device_memory");
// `bind/register_errors.cpp` maps each class to a Python exception. Any thread may throw. An exception on a worker
// thread is rethrown on the thread that waits for the work (`HostEvent`).
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace patrickstar {

// Invalid argument. Python: ValueError.
class ArgumentError : public std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// A call in the wrong state (backward before forward, a closed engine). Python: RuntimeError.
class StateError : public std::logic_error {
  using std::logic_error::logic_error;
};

// A memory limit does not suffice. Python: patrickstar.MemoryBudgetError.
class MemoryBudgetError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The operating system, the CUDA driver or NCCL refused a call. Python: RuntimeError.
class SystemError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A disk with optimizer states is full, fails, or returns other bytes than were written. Python: patrickstar.DiskError.
class DiskError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Another rank of a group died, left by an exception, or timed out. Python: RuntimeError.
class RankFailure : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Ranks of a group make different calls, or reduce gradients of different chunks. All ranks throw it, and the message
// names each rank's call. Python: RuntimeError.
class RankMismatch : public StateError {
  using StateError::StateError;
};

namespace detail {
template <typename... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}
}  // namespace detail

}  // namespace patrickstar

#define PS_CHECK(condition, ErrorClass, ...)                      \
  do {                                                            \
    if (__builtin_expect(!(condition), 0)) {                      \
      throw ErrorClass(::patrickstar::detail::join(__VA_ARGS__)); \
    }                                                             \
  } while (false)
