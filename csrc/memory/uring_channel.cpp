// io_uring by its three system calls, for a ring that one thread uses.
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "common/check.h"
#include "memory/disk_channel.h"

namespace patrickstar {

namespace {

// Transfers in flight. Not measured.
constexpr unsigned kDepth = 32;
// The kernel's limit per registered buffer.
constexpr int64_t kMostRegistered = int64_t{1} << 30;

template <typename... Args>
int64_t call(int64_t number, Args... args) {
  int64_t result = -1;
  do {
    result = syscall(number, args...);
  } while (result < 0 && errno == EINTR);
  return result;
}

class Mapping {
 public:
  Mapping(int ring, size_t num_bytes, int64_t offset) : num_bytes_(num_bytes) {
    data_ = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, offset);
  }
  ~Mapping() {
    if (is_mapped()) munmap(data_, num_bytes_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  bool is_mapped() const { return data_ != MAP_FAILED; }
  template <typename T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(data_) + offset);
  }

 private:
  size_t num_bytes_;
  void* data_;
};

class RingDescriptor {
 public:
  explicit RingDescriptor(int fd) : fd_(fd) {}
  ~RingDescriptor() {
    if (fd_ >= 0) close(fd_);
  }
  RingDescriptor(const RingDescriptor&) = delete;
  RingDescriptor& operator=(const RingDescriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

size_t submission_bytes(const io_uring_params& params) {
  return params.sq_off.array + params.sq_entries * sizeof(unsigned);
}

size_t completion_bytes(const io_uring_params& params) {
  return params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
}

// The kernel accesses heads and tails concurrently.
unsigned load(const unsigned* value) { return __atomic_load_n(value, __ATOMIC_ACQUIRE); }
void store(unsigned* value, unsigned to) { __atomic_store_n(value, to, __ATOMIC_RELEASE); }

class UringChannel final : public DiskChannel {
 public:
  UringChannel(int fd, int ring, const io_uring_params& params)
      : fd_(fd),
        ring_(ring),
        submissions_(ring, submission_bytes(params), IORING_OFF_SQ_RING),
        completions_(ring, completion_bytes(params), IORING_OFF_CQ_RING),
        entries_(ring, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES),
        params_(params) {}

  bool is_mapped() const { return submissions_.is_mapped() && completions_.is_mapped() && entries_.is_mapped(); }

  void register_memory(const std::vector<MemoryRange>& ranges) {
    std::vector<iovec> pieces;
    for (const MemoryRange& range : ranges) {
      for (int64_t begin = 0; begin < range.num_bytes; begin += kMostRegistered) {
        const int64_t num_bytes = std::min(kMostRegistered, range.num_bytes - begin);
        pieces.push_back({range.data + begin, static_cast<size_t>(num_bytes)});
      }
    }
    if (pieces.empty()) return;
    const int64_t result = call(__NR_io_uring_register, ring_.get(), IORING_REGISTER_BUFFERS, pieces.data(),
                                static_cast<unsigned>(pieces.size()));
    if (result == 0) registered_ = std::move(pieces);
  }

  std::string name() const override { return registered_.empty() ? "io_uring" : "io_uring with registered buffers"; }
  int depth() const override { return static_cast<int>(std::min(kDepth, params_.sq_entries)); }

  void start(const DiskTransfer& transfer, uint64_t tag) override {
    auto* tail = submissions_.at<unsigned>(params_.sq_off.tail);
    const unsigned mask = *submissions_.at<unsigned>(params_.sq_off.ring_mask);
    const unsigned position = *tail;
    const unsigned index = position & mask;
    io_uring_sqe& entry = entries_.at<io_uring_sqe>(0)[index];
    fill(entry, index, transfer);
    entry.user_data = tag;
    submissions_.at<unsigned>(params_.sq_off.array)[index] = index;
    store(tail, position + 1);
    ++num_unsubmitted_;
    if (num_unsubmitted_ >= kBatch) submit(0);
  }

  Completion wait() override {
    auto* head = completions_.at<unsigned>(params_.cq_off.head);
    const auto* tail = completions_.at<unsigned>(params_.cq_off.tail);
    const unsigned mask = *completions_.at<unsigned>(params_.cq_off.ring_mask);
    const unsigned position = *head;
    if (num_unsubmitted_ > 0) submit(0);
    while (load(tail) == position) submit(1);
    const io_uring_cqe& entry = completions_.at<io_uring_cqe>(params_.cq_off.cqes)[position & mask];
    const Completion completion{entry.user_data, entry.res};
    store(head, position + 1);
    return completion;
  }

 private:
  static constexpr unsigned kBatch = 4;  // transfers per system call; not measured

  void fill(io_uring_sqe& entry, unsigned index, const DiskTransfer& transfer) {
    std::memset(&entry, 0, sizeof(entry));
    const bool reads = transfer.direction == DiskDirection::kRead;
    entry.fd = fd_;
    entry.off = static_cast<uint64_t>(transfer.offset);
    const int buffer = buffer_of(transfer);
    if (buffer >= 0) {
      entry.opcode = reads ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED;
      entry.addr = reinterpret_cast<uint64_t>(transfer.data);
      entry.len = static_cast<unsigned>(transfer.num_bytes);
      entry.buf_index = static_cast<uint16_t>(buffer);
    } else {
      vectors_[index % vectors_.size()] = {transfer.data, static_cast<size_t>(transfer.num_bytes)};
      entry.opcode = reads ? IORING_OP_READV : IORING_OP_WRITEV;
      entry.addr = reinterpret_cast<uint64_t>(&vectors_[index % vectors_.size()]);
      entry.len = 1;
    }
  }

  // Index of the registered piece that contains the transfer; -1: none.
  int buffer_of(const DiskTransfer& transfer) const {
    for (size_t i = 0; i < registered_.size(); ++i) {
      const auto* begin = static_cast<const char*>(registered_[i].iov_base);
      const char* end = begin + registered_[i].iov_len;
      if (transfer.data >= begin && transfer.data + transfer.num_bytes <= end) return static_cast<int>(i);
    }
    return -1;
  }

  void submit(unsigned num_awaited) {
    const int64_t result = call(__NR_io_uring_enter, ring_.get(), num_unsubmitted_, num_awaited,
                                num_awaited > 0 ? IORING_ENTER_GETEVENTS : 0u, nullptr, size_t{0});
    if (result >= 0) {
      num_unsubmitted_ -= static_cast<unsigned>(result);
      return;
    }
    // The kernel is short of memory; transfers in flight end first.
    PS_CHECK(errno == EAGAIN || errno == EBUSY, SystemError, "io_uring refuses transfers: ", std::strerror(errno),
             "; set disk_memory.io to \"threads\"");
    usleep(1000);
  }

  const int fd_;
  const RingDescriptor ring_;
  const Mapping submissions_;
  const Mapping completions_;
  const Mapping entries_;
  const io_uring_params params_;
  std::vector<iovec> registered_;
  std::array<iovec, kDepth> vectors_{};  // for transfers of unregistered memory
  unsigned num_unsubmitted_ = 0;
};

}  // namespace

std::unique_ptr<DiskChannel> open_uring_channel(int fd, const std::vector<MemoryRange>& registered, int& error) {
  io_uring_params params{};
  const auto ring = static_cast<int>(call(__NR_io_uring_setup, kDepth, &params));
  if (ring < 0) {
    error = errno;
    return nullptr;
  }
  auto channel = std::make_unique<UringChannel>(fd, ring, params);
  // Since Linux 5.5 a submitted transfer's descriptor may be reused.
  const bool is_stable = (params.features & IORING_FEAT_SUBMIT_STABLE) != 0;
  if (!channel->is_mapped() || !is_stable) {
    error = is_stable ? ENOMEM : ENOSYS;
    return nullptr;
  }
  channel->register_memory(registered);
  return channel;
}

}  // namespace patrickstar
