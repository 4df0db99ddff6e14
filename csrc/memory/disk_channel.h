// Transfers between memory and a file, several under way at once: by io_uring, or by threads that call pread and
// pwrite. Which of them is decided when a channel is opened (DiskIo).
//
//   std::unique_ptr<DiskChannel> channel = open_disk_channel(fd, DiskIo::kAuto, memory);
//   channel->start({DiskDirection::kRead, data, offset, num_bytes}, tag);   // at most depth() are under way
//   DiskChannel::Completion done = channel->wait();                         // one of them, in any order
//
// [Note: registered buffers] Memory that is given when the channel is opened is registered with io_uring where the
// system lets this process lock so much (RLIMIT_MEMLOCK), so that its pages are looked up and pinned once instead of at
// every transfer. Other memory can be used all the same.
//
// A channel is used by one thread at a time, and allocates nothing. Whoever has started a transfer waits for it, also
// when another one failed: until then the system may write the memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace patrickstar {

enum class DiskIo : uint8_t {
  kAuto,     // io_uring where the kernel has it and lets this process use it, else threads
  kUring,    // io_uring or an error
  kThreads,  // threads with pread and pwrite
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
    int64_t result = 0;  // bytes, of which there may be fewer than asked for, or an error number, negative
  };

  virtual ~DiskChannel() = default;
  // "io_uring with registered buffers", "io_uring" or "threads".
  virtual std::string name() const = 0;
  virtual int depth() const = 0;
  virtual void start(const DiskTransfer& transfer, uint64_t tag) = 0;
  virtual Completion wait() = 0;
};

// `registered`: memory that is used again and again. Throws SystemError when the channel that is asked for cannot be
// opened.
std::unique_ptr<DiskChannel> open_disk_channel(int fd, DiskIo io, const std::vector<MemoryRange>& registered);

// Null where the kernel has no io_uring, or does not let this process use it; `error` is its number then.
std::unique_ptr<DiskChannel> open_uring_channel(int fd, const std::vector<MemoryRange>& registered, int& error);

}  // namespace patrickstar
