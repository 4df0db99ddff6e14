// Errors of the core, and the macro that raises them.
//
// A message names the subject, the value, the limit and the remedy:
//   PS_CHECK(bytes <= room, MemoryBudgetError, "chunk ", id, " needs ", bytes, " bytes on the device, ",
//            room, " are left; raise device_memory");
// `bind/register_errors.cpp` maps each class to a Python exception. Any thread may throw them; an
// exception that leaves a worker thread is carried to the thread that waits for it.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace patrickstar {

// A caller's argument is wrong. Python: ValueError.
class ArgumentError : public std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// The call is right, the moment is not (backward before forward, a closed engine). Python: RuntimeError.
class StateError : public std::logic_error {
  using std::logic_error::logic_error;
};

// Something does not fit a memory budget. Python: patrickstar.MemoryBudgetError.
class MemoryBudgetError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The operating system, the CUDA driver or NCCL refused. Python: RuntimeError.
class SystemError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A disk that holds optimizer states is full, fails, or gives back other bytes than were written. Python:
// patrickstar.DiskError.
class DiskError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Another rank of a group died, left by an exception, or did not take part in time. Python: RuntimeError.
class RankFailure : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Ranks of a group make different calls at the same time, or add up gradients of different chunks. All of them throw it
// at once, and it names what each does. Python: RuntimeError.
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
