#include "memory/disk_channel.h"

#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>

#include "common/check.h"
#include "common/work_queue.h"

namespace patrickstar {

namespace {

// Enough to keep a solid-state disk busy with transfers of a few MiB each.
constexpr int kNumThreads = 4;

class ThreadChannel final : public DiskChannel {
 public:
  explicit ThreadChannel(int fd) : fd_(fd), queues_(kNumThreads) {}

  std::string name() const override { return "threads"; }
  int depth() const override { return kNumThreads; }

  void start(const DiskTransfer& transfer, uint64_t tag) override {
    queues_[next_++ % queues_.size()].submit([this, transfer, tag] {
      const int64_t result = run(transfer);
      const std::lock_guard<std::mutex> lock(mutex_);
      completions_.push_back({tag, result});
      changed_.notify_one();
    });
  }

  Completion wait() override {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return !completions_.empty(); });
    const Completion completion = completions_.front();
    completions_.pop_front();
    return completion;
  }

 private:
  int64_t run(const DiskTransfer& transfer) const {
    const auto size = static_cast<size_t>(transfer.num_bytes);
    ssize_t result = -1;
    do {
      result = transfer.direction == DiskDirection::kRead ? pread(fd_, transfer.data, size, transfer.offset)
                                                          : pwrite(fd_, transfer.data, size, transfer.offset);
    } while (result < 0 && errno == EINTR);
    return result < 0 ? -static_cast<int64_t>(errno) : result;
  }

  const int fd_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Completion> completions_;
  size_t next_ = 0;
  std::vector<WorkQueue> queues_;  // ends before what it uses
};

}  // namespace

std::unique_ptr<DiskChannel> open_disk_channel(int fd, DiskIo io, const std::vector<MemoryRange>& registered) {
  if (io != DiskIo::kThreads) {
    int error = 0;
    std::unique_ptr<DiskChannel> channel = open_uring_channel(fd, registered, error);
    if (channel != nullptr) return channel;
    PS_CHECK(io == DiskIo::kAuto, SystemError, "io_uring cannot be used here: ", std::strerror(error),
             "; set disk_memory.io to \"auto\" or \"threads\"");
  }
  return std::make_unique<ThreadChannel>(fd);
}

}  // namespace patrickstar
