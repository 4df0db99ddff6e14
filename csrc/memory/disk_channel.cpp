#include "memory/disk_channel.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

#include "common/check.h"

namespace patrickstar {

namespace {

// Threads per channel, for transfers of DiskFile pieces. Not measured.
constexpr int kNumThreads = 4;

class ThreadChannel final : public DiskChannel {
 public:
  explicit ThreadChannel(int fd) : fd_(fd) {
    try {
      for (Slot& slot : slots_) slot.thread = std::thread([this, &slot] { work(slot); });
    } catch (...) {
      stop();
      throw;
    }
  }
  ~ThreadChannel() override { stop(); }
  ThreadChannel(const ThreadChannel&) = delete;
  ThreadChannel& operator=(const ThreadChannel&) = delete;

  std::string name() const override { return "threads"; }
  int depth() const override { return kNumThreads; }

  void start(const DiskTransfer& transfer, uint64_t tag) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    Slot& slot = *find(Stage::kFree);
    slot.transfer = transfer;
    slot.completion.tag = tag;
    slot.stage = Stage::kStarted;
    started_.notify_all();
  }

  Completion wait() override {
    std::unique_lock<std::mutex> lock(mutex_);
    Slot* over = nullptr;
    ended_.wait(lock, [&] { return (over = find(Stage::kOver)) != nullptr; });
    over->stage = Stage::kFree;
    return over->completion;
  }

 private:
  enum class Stage : uint8_t { kFree, kStarted, kOver };
  struct Slot {
    Stage stage = Stage::kFree;
    DiskTransfer transfer;
    Completion completion;
    std::thread thread;
  };

  Slot* find(Stage stage) {
    const auto found =
        std::find_if(slots_.begin(), slots_.end(), [=](const Slot& slot) { return slot.stage == stage; });
    return found == slots_.end() ? nullptr : &*found;
  }

  void work(Slot& slot) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      started_.wait(lock, [&] { return stopping_ || slot.stage == Stage::kStarted; });
      if (stopping_) return;
      lock.unlock();
      slot.completion.result = run(slot.transfer);
      lock.lock();
      slot.stage = Stage::kOver;
      ended_.notify_one();
    }
  }

  int64_t run(const DiskTransfer& transfer) const {
    const auto size = static_cast<size_t>(transfer.num_bytes);
    ssize_t result = -1;
    do {
      result = transfer.direction == DiskDirection::kRead ? pread(fd_, transfer.data, size, transfer.offset)
                                                          : pwrite(fd_, transfer.data, size, transfer.offset);
    } while (result < 0 && errno == EINTR);
    return result < 0 ? -static_cast<int64_t>(errno) : result;
  }

  void stop() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    started_.notify_all();
    for (Slot& slot : slots_) {
      if (slot.thread.joinable()) slot.thread.join();
    }
  }

  const int fd_;
  std::mutex mutex_;
  std::condition_variable started_;
  std::condition_variable ended_;
  bool stopping_ = false;
  std::array<Slot, kNumThreads> slots_;
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
