// Concurrent transfers between memory and a file, by io_uring or by threads with pread and pwrite.
//
//   std::unique_ptr<DiskChannel> channel = open_disk_channel(fd, DiskIo::kAuto, memory);
//   channel->start({DiskDirection::kRead, data, offset, num_bytes}, tag);   // at most depth() are under way
//   DiskChannel::Completion done = channel->wait();                         // one of them, in any order
//
// One thread at a time; allocates nothing. Every started transfer must be waited for, also after another one failed:
// until then the system may write the memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace patrickstar {

enum class DiskIo : uint8_t {
  kAuto,     // io_uring if kernel and process may use it, else threads
  kUring,    // io_uring, or an error
  kThreads,  // pread and pwrite
};

enum class DiskDirection : uint8_t { kRead, kWrite };

struct DiskTransfer {
  DiskDirection direction = DiskDirection::kRead;
  char* data = nullptr;
  int64_t offset = 0;  // in the file
  int64_t num_bytes = 0;
};

struct MemoryRange {
  char* data = nullptr;
  int64_t num_bytes = 0;
};

class DiskChannel {
 public:
  struct Completion {
    uint64_t tag = 0;
    int64_t result = 0;  // bytes, possibly fewer than requested, or -errno
  };

  virtual ~DiskChannel() = default;
  // "io_uring with registered buffers", "io_uring" or "threads".
  virtual std::string name() const = 0;
  virtual int depth() const = 0;
  virtual void start(const DiskTransfer& transfer, uint64_t tag) = 0;
  virtual Completion wait() = 0;
};

// `registered`: memory that is used repeatedly. io_uring registers it if RLIMIT_MEMLOCK allows, so its pages are looked
// up and pinned once instead of per transfer. Other memory works too. Throws SystemError if the requested channel
// cannot be opened.
std::unique_ptr<DiskChannel> open_disk_channel(int fd, DiskIo io, const std::vector<MemoryRange>& registered);

// Null if the kernel has no io_uring or forbids it to this process; `error` is then errno.
std::unique_ptr<DiskChannel> open_uring_channel(int fd, const std::vector<MemoryRange>& registered, int& error);

}  // namespace patrickstar
