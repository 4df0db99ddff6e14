// For LD_PRELOAD: allocations of the extension and of PyTorch's tensors fail, the n-th from when it is asked for.
//
//   c++ -std=c++17 -shared -fPIC -O1 -o failing_memory.so failing_memory.cpp -ldl
//   fail_for(0, begin, end);   // addresses of the code of the extension (0) or of PyTorch (1); once
//   fail_nth(kNew | kMap, 7, 0);   // the seventh fails; with 1 in place of 0, all later ones too
//   ... MemoryError ...
//   int64_t num_asked = stop_failing();
//
// `operator new` of threads that hold the GIL is left alone: nanobind ends the process where it cannot note an object
// that it has made.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <new>

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_memalign(size_t, size_t);
}

namespace {

// Kinds of allocations, by call and library.
constexpr int kNew = 1;      // operator new
constexpr int kMap = 2;      // mmap
constexpr int kMalloc = 4;   // malloc, calloc, posix_memalign, aligned_alloc
constexpr int kTensor = 8;   // posix_memalign of PyTorch's allocator
constexpr int kThread = 16;  // the start of any thread

struct Code {
  std::atomic<uintptr_t> begin{0};
  std::atomic<uintptr_t> end{0};
  bool has(const void* caller) const {
    const auto address = reinterpret_cast<uintptr_t>(caller);
    return address >= begin && address < end;
  }
};

Code extension;
Code torch;
std::atomic<int> kinds{0};  // 0: none fails
std::atomic<int64_t> nth{0};
std::atomic<bool> and_on{false};
std::atomic<int64_t> num_asked{0};

bool has_gil() {
  static const auto check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  return check() != 0;
}

bool is_due() {
  const int64_t count = ++num_asked;
  return count == nth || (and_on && count > nth);
}

bool must_fail(int kind, const Code& code, const void* caller) {
  if ((kinds.load(std::memory_order_relaxed) & kind) == 0 || !code.has(caller)) return false;
  return (kind != kNew || !has_gil()) && is_due();
}

bool must_fail_aligned(const void* caller) {
  return must_fail(kMalloc, extension, caller) || must_fail(kTensor, torch, caller);
}

void* allocate(size_t num_bytes, size_t alignment, const void* caller) {
  if (must_fail(kNew, extension, caller)) throw std::bad_alloc();
  void* data = alignment == 0 ? __libc_malloc(num_bytes) : __libc_memalign(alignment, num_bytes);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

void* no_memory() {
  errno = ENOMEM;
  return nullptr;
}

}  // namespace

extern "C" {

void fail_for(int library, uintptr_t begin, uintptr_t end) {
  Code& code = library == 0 ? extension : torch;
  code.begin = begin;
  code.end = end;
}

void fail_nth(int new_kinds, int64_t n, int from_there_on) {
  kinds = 0;
  num_asked = 0;
  nth = n;
  and_on = from_there_on != 0;
  kinds = new_kinds;
}

int64_t stop_failing() {
  kinds = 0;
  return num_asked;
}

void* malloc(size_t num_bytes) {
  return must_fail(kMalloc, extension, __builtin_return_address(0)) ? no_memory() : __libc_malloc(num_bytes);
}
void* calloc(size_t count, size_t num_bytes) {
  return must_fail(kMalloc, extension, __builtin_return_address(0)) ? no_memory() : __libc_calloc(count, num_bytes);
}
void* aligned_alloc(size_t alignment, size_t num_bytes) {
  return must_fail_aligned(__builtin_return_address(0)) ? no_memory() : __libc_memalign(alignment, num_bytes);
}
int posix_memalign(void** data, size_t alignment, size_t num_bytes) {
  if (must_fail_aligned(__builtin_return_address(0))) return ENOMEM;
  *data = __libc_memalign(alignment, num_bytes);
  return *data == nullptr ? ENOMEM : 0;
}
void* mmap(void* address, size_t length, int protection, int flags, int fd, off_t offset) {
  static const auto real = reinterpret_cast<decltype(&mmap)>(dlsym(RTLD_NEXT, "mmap"));
  if (must_fail(kMap, extension, __builtin_return_address(0))) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  return real(address, length, protection, flags, fd, offset);
}
int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
  static const auto real = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  if ((kinds & kThread) != 0 && is_due()) return EAGAIN;
  return real(thread, attributes, run, argument);
}

}  // extern "C"

void* operator new(size_t num_bytes) { return allocate(num_bytes, 0, __builtin_return_address(0)); }
void* operator new[](size_t num_bytes) { return allocate(num_bytes, 0, __builtin_return_address(0)); }
void* operator new(size_t num_bytes, std::align_val_t alignment) {
  return allocate(num_bytes, static_cast<size_t>(alignment), __builtin_return_address(0));
}
