// For LD_PRELOAD: one allocation of the extension's own code fails, the n-th from when it is asked for.
//
//   g++ -shared -fPIC -O1 -o failing_new.so failing_new.cpp
//   fail_nth(7, begin, end);   // of those that code between these addresses asks for
//   ... MemoryError ...
//   int64_t num_asked = stop_failing();
//
// Threads that hold the GIL are left alone: nanobind ends the process where it cannot note an object that it has made.
#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

std::atomic<int64_t> nth{0};  // 0: none
std::atomic<int64_t> num_asked{0};
std::atomic<uintptr_t> code_begin{0};
std::atomic<uintptr_t> code_end{0};

bool has_gil() {
  static const auto check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  return check() != 0;
}

bool must_fail(const void* caller) {
  if (nth.load(std::memory_order_relaxed) == 0) return false;
  const auto address = reinterpret_cast<uintptr_t>(caller);
  if (address < code_begin || address >= code_end || has_gil()) return false;
  return ++num_asked == nth;
}

void* allocate(size_t num_bytes, size_t alignment, const void* caller) {
  if (must_fail(caller)) throw std::bad_alloc();
  void* data = alignment == 0 ? std::malloc(num_bytes)
                              : std::aligned_alloc(alignment, (num_bytes + alignment - 1) / alignment * alignment);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

}  // namespace

extern "C" void fail_nth(int64_t n, uintptr_t begin, uintptr_t end) {
  nth = 0;
  num_asked = 0;
  code_begin = begin;
  code_end = end;
  nth = n;
}

extern "C" int64_t stop_failing() {
  nth = 0;
  return num_asked;
}

void* operator new(size_t num_bytes) { return allocate(num_bytes, 0, __builtin_return_address(0)); }
void* operator new[](size_t num_bytes) { return allocate(num_bytes, 0, __builtin_return_address(0)); }
void* operator new(size_t num_bytes, std::align_val_t alignment) {
  return allocate(num_bytes, static_cast<size_t>(alignment), __builtin_return_address(0));
}
