#include "memory/disk_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>

#include "common/check.h"
#include "common/crc32c.h"
#include "common/sizes.h"

namespace patrickstar {

namespace {

// Bytes per disk request: enough for the disk's full rate, few enough for checksums to keep up. Not measured.
constexpr int64_t kPieceBytes = int64_t{1} << 20;

// Transfers without progress until EIO. Not measured.
constexpr int kMostStuck = 100;

const char* doing(DiskDirection direction) { return direction == DiskDirection::kRead ? "reading" : "writing"; }

std::string remedy(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "free space there, or set disk_memory.path to a folder on a larger disk";
    case EFBIG:
      return "raise the limit of this process on the size of files (ulimit -f)";
    case EACCES:
    case EPERM:
    case EROFS:
      return "set disk_memory.path to a folder that this process may write in";
    case ENOENT:
    case ENOTDIR:
      return "make the folder, or set disk_memory.path to one that there is";
    default:
      return "check the disk (dmesg says what the kernel saw of it), set disk_memory.path to a folder on another one, "
             "and go on from the last checkpoint, which this does not touch";
  }
}

// Counts down; true once it has reached 0.
bool is_over(std::atomic<int64_t>& countdown) {
  const int64_t left = countdown.load();
  if (left < 0) return false;
  if (left > 0) --countdown;
  return left == 0;
}

}  // namespace

// One read() or write(): its ranges in pieces, in order.
class DiskFile::Transfer {
 public:
  Transfer(const std::vector<DiskRange>& ranges, DiskDirection direction, DiskChannel& channel, DiskFaults* faults)
      : ranges_(ranges), direction_(direction), channel_(channel), faults_(faults), crcs_(ranges.size(), 0) {
    for (size_t i = 0; i < ranges.size(); ++i) {
      for (int64_t begin = 0; begin < ranges[i].num_bytes; begin += kPieceBytes) {
        const int64_t num_bytes = std::min(kPieceBytes, ranges[i].num_bytes - begin);
        pieces_.push_back({static_cast<char*>(ranges[i].data) + begin, ranges[i].offset + begin, num_bytes, i});
      }
    }
  }

  // Returns the first errno; 0 on success.
  int run() {
    size_t next = 0;
    while (true) {
      while (next < pieces_.size() && error_ == 0 && num_under_way_ < channel_.depth()) {
        if (direction_ == DiskDirection::kWrite) add_to_checksum(pieces_[next]);
        start(next++);
      }
      if (num_under_way_ == 0) return error_;
      finish(channel_.wait());
      while (direction_ == DiskDirection::kRead && num_summed_ < next && pieces_[num_summed_].is_done()) {
        add_to_checksum(pieces_[num_summed_++]);
      }
    }
  }

  DiskDirection direction() const { return direction_; }
  const std::vector<DiskRange>& ranges() const { return ranges_; }
  int64_t num_bytes() const {
    return std::accumulate(ranges_.begin(), ranges_.end(), int64_t{0},
                           [](int64_t sum, const DiskRange& range) { return sum + range.num_bytes; });
  }
  std::vector<uint32_t> take_checksums() { return std::move(crcs_); }

 private:
  struct Piece {
    char* data;
    int64_t offset;
    int64_t num_bytes;
    size_t range;
    int64_t done = 0;

    bool is_done() const { return done == num_bytes; }
  };

  void start(size_t index) {
    const Piece& piece = pieces_[index];
    int64_t num_bytes = piece.num_bytes - piece.done;
    if (faults_ != nullptr && faults_->cuts_short && piece.done == 0 && index % 2 == 0 && num_bytes > kAlignment) {
      num_bytes = kAlignment;
    }
    channel_.start({direction_, piece.data + piece.done, piece.offset + piece.done, num_bytes}, index);
    ++num_under_way_;
  }

  void finish(DiskChannel::Completion completion) {
    --num_under_way_;
    Piece& piece = pieces_[completion.tag];
    if (faults_ != nullptr) completion.result = with_faults(completion.result, piece);
    if (completion.result == -EAGAIN || completion.result == -EINTR) return start(completion.tag);
    if (completion.result <= 0) {
      // A read of 0 bytes means that the file was truncated.
      if (error_ == 0) error_ = completion.result == 0 ? EIO : static_cast<int>(-completion.result);
      return;
    }
    const int64_t before = piece.done;
    piece.done += completion.result;
    // O_DIRECT transfers whole blocks only.
    if (!piece.is_done()) piece.done = piece.done / kAlignment * kAlignment;
    if (piece.done == before && ++num_stuck_ > kMostStuck && error_ == 0) error_ = EIO;
    if (!piece.is_done() && error_ == 0) start(completion.tag);
  }

  int64_t with_faults(int64_t result, Piece& piece) {
    const bool reads = direction_ == DiskDirection::kRead;
    std::this_thread::sleep_for(std::chrono::duration<double>(faults_->seconds_per_piece.load()));
    if (is_over(reads ? faults_->reads_before_error : faults_->writes_before_error)) return -faults_->error_number;
    if (reads && is_over(faults_->reads_before_flip)) {
      faults_->reads_before_flip = -1;
      piece.data[piece.done] = static_cast<char>(piece.data[piece.done] ^ 1);
    }
    return result;
  }

  void add_to_checksum(const Piece& piece) {
    crcs_[piece.range] = crc32c(crcs_[piece.range], piece.data, static_cast<size_t>(piece.num_bytes));
  }

  const std::vector<DiskRange> ranges_;
  const DiskDirection direction_;
  DiskChannel& channel_;
  DiskFaults* const faults_;
  std::vector<uint32_t> crcs_;  // by range, of its first pieces
  std::vector<Piece> pieces_;
  size_t num_summed_ = 0;  // reads only
  int num_under_way_ = 0;
  int num_stuck_ = 0;  // transfers of less than a block
  int error_ = 0;
};

DiskFile::DiskFile(std::string folder, int64_t num_bytes, DiskFileOptions options,
                   const std::vector<MemoryRange>& registered)
    : folder_(std::move(folder)), num_bytes_(round_up(num_bytes)), options_(std::move(options)) {
  open();
  try {
    allocate();
    is_direct_ = !is_plain() && fcntl(fd_, F_SETFL, O_DIRECT) == 0;
    for (Lane* lane : {&reads_, &writes_}) lane->channel = open_disk_channel(fd_, options_.io, registered);
  } catch (...) {
    close(fd_);
    throw;
  }
}

DiskFile::~DiskFile() {
  reads_.channel.reset();
  writes_.channel.reset();
  close(fd_);
}

// Uses O_TMPFILE where the file system has it, else unlinks the name at once.
void DiskFile::open() {
  fd_ = is_plain() ? -1 : ::open(folder_.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd_ < 0 && (is_plain() || errno == EOPNOTSUPP || errno == EISDIR)) {
    std::string name = folder_ + "/patrickstar-XXXXXX";
    fd_ = mkostemp(name.data(), O_CLOEXEC);
    if (fd_ >= 0) unlink(name.c_str());
  }
  const int error = errno;
  PS_CHECK(fd_ >= 0, DiskError, "disk_memory: no file can be made in ", folder_, ": ", std::strerror(error), "; ",
           remedy(error));
}

bool DiskFile::is_plain() const { return options_.faults != nullptr && options_.faults->is_plain; }

void DiskFile::allocate() {
  struct statvfs system{};
  const bool is_known = fstatvfs(fd_, &system) == 0;  // before a failed fallocate, which may keep what it found
  const int64_t free_bytes = static_cast<int64_t>(system.f_bavail) * static_cast<int64_t>(system.f_frsize);
  int error = is_plain() ? EOPNOTSUPP : fallocate(fd_, 0, 0, num_bytes_) == 0 ? 0 : errno;
  if (error == EOPNOTSUPP) {
    error = is_known && free_bytes < num_bytes_ ? ENOSPC : ftruncate(fd_, num_bytes_) == 0 ? 0 : errno;
  }
  PS_CHECK(error == 0, DiskError, "disk_memory: optimizer states need ", show_exactly(num_bytes_), " in ", folder_,
           is_known ? detail::join(", where ", show_exactly(free_bytes), " are free: ") : std::string(": "),
           std::strerror(error), "; ", remedy(error), ". Nothing was trained yet");
}

std::vector<uint32_t> DiskFile::read(const std::vector<DiskRange>& ranges) {
  return run(*prepare(DiskDirection::kRead, ranges));
}

std::vector<uint32_t> DiskFile::write(const std::vector<DiskRange>& ranges) {
  return run(*prepare(DiskDirection::kWrite, ranges));
}

std::shared_ptr<DiskFile::Transfer> DiskFile::prepare(DiskDirection direction, const std::vector<DiskRange>& ranges) {
  for (const DiskRange& range : ranges) {
    const bool is_aligned = range.offset % kAlignment == 0 && range.num_bytes % kAlignment == 0 &&
                            reinterpret_cast<uintptr_t>(range.data) % kAlignment == 0;
    PS_CHECK(is_aligned && range.offset >= 0 && range.offset + range.num_bytes <= num_bytes_, ArgumentError,
             "a range of ", range.num_bytes, " bytes at ", range.offset, " is not in a file of ", num_bytes_,
             " bytes, or no multiple of ", kAlignment);
  }
  return std::make_shared<Transfer>(ranges, direction, *lane(direction).channel, options_.faults.get());
}

std::vector<uint32_t> DiskFile::run(Transfer& transfer) {
  const DiskDirection direction = transfer.direction();
  const std::lock_guard<std::mutex> lock(lane(direction).mutex);
  const int error = transfer.run();
  PS_CHECK(error == 0, DiskError, "disk_memory: ", doing(direction), " ", show_exactly(transfer.num_bytes()),
           " of optimizer states in ", folder_, " failed: ", std::strerror(error), "; ", remedy(error));
  if (!is_direct_) {
    for (const DiskRange& range : transfer.ranges()) drop_from_cache(direction, range);
  }
  return transfer.take_checksums();
}

// The cache keeps dirty pages, so they are written first.
void DiskFile::drop_from_cache(DiskDirection direction, const DiskRange& range) {
  if (direction == DiskDirection::kWrite) {
    const unsigned flags = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    const int error = sync_file_range(fd_, range.offset, range.num_bytes, flags) == 0 ? 0 : errno;
    // the file system has no sync_file_range
    const bool is_refused = error == ESPIPE || error == EINVAL || error == ENOSYS;
    PS_CHECK(error == 0 || is_refused, DiskError, "disk_memory: writing ", show_exactly(range.num_bytes),
             " of optimizer states in ", folder_, " failed: ", std::strerror(error), "; ", remedy(error));
  }
  posix_fadvise(fd_, range.offset, range.num_bytes, POSIX_FADV_DONTNEED);
}

std::string DiskFile::how() const {
  return reads_.channel->name() + (is_direct_ ? ", O_DIRECT" : ", through the file cache");
}

}  // namespace patrickstar
