// Planted faults for tools/sanitize.py. Each function has the fault that its name says, which a working sanitizer must
// report. Functions named `no_` have none and must get no report. Compiled as a separate library with the extension's
// flags, and called through ctypes: CDLL without the GIL, PyDLL with it.
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

namespace {

int64_t counter = 0;
std::mutex mutex;

// Hides the value from the compiler.
int read(volatile int value) { return value; }

template <typename Work>
void on_two_threads(Work work) {
  std::thread first(work);
  std::thread second(work);
  first.join();
  second.join();
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) int heap_overflow() {
  const std::unique_ptr<char[]> data(new char[8]());
  return data.get()[read(8)];
}

__attribute__((visibility("default"))) int use_after_free() {
  auto* data = new int[4];
  delete[] data;
  return data[read(1)];
}

__attribute__((visibility("default"))) int vector_index() {
  const std::vector<int> values(4);
  return values[static_cast<size_t>(read(4))];
}

__attribute__((visibility("default"))) int signed_overflow() { return read(0x7fffffff) + read(1); }

__attribute__((visibility("default"))) int64_t misaligned_load() {
  alignas(8) static char data[16] = {};
  return *reinterpret_cast<int64_t*>(data + read(1));
}

__attribute__((visibility("default"))) void null_copy() {
  char to = 0;
  std::memcpy(&to, read(0) == 0 ? nullptr : &to, static_cast<size_t>(read(0)));
}

__attribute__((visibility("default"))) int float_cast() {
  const volatile double value = 1e30;
  return static_cast<int>(value);
}

__attribute__((visibility("default"))) void data_race() {
  on_two_threads([] { ++counter; });
}

// Uses memcpy, which the sanitizer intercepts.
__attribute__((visibility("default"))) void copy_race() {
  static std::vector<char> from(1 << 12), to(1 << 12);
  on_two_threads([] { std::memcpy(to.data(), from.data(), static_cast<size_t>(read(1 << 12))); });
}

__attribute__((visibility("default"))) void lock_order() {
  static std::mutex other;
  {
    const std::lock_guard<std::mutex> outer(mutex);
    const std::lock_guard<std::mutex> inner(other);
  }
  const std::lock_guard<std::mutex> outer(other);
  const std::lock_guard<std::mutex> inner(mutex);
}

// Called by two Python threads: a race without the GIL, none with it. The sleep makes the calls overlap.
__attribute__((visibility("default"))) void count() {
  ++counter;
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
}

__attribute__((visibility("default"))) void no_fault() {
  on_two_threads([] {
    const std::lock_guard<std::mutex> lock(mutex);
    ++counter;
  });
  static std::timed_mutex timed;
  static int64_t guarded = 0;
  on_two_threads([] {
    const std::unique_lock<std::timed_mutex> lock(timed, std::chrono::seconds(10));
    ++guarded;
  });
  try {  // the sanitizer's interception of exceptions works
    throw std::runtime_error("caught");
  } catch (const std::exception&) {
  }
}

}  // extern "C"
