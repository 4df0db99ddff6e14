// A file on a disk as memory for arrays: ranges of bytes that are written and read back.
//
// The file has no name from the moment it is opened, so nothing is left behind whatever becomes of the process, and all
// of its bytes are allocated then, so a disk that is too small is found before the first step. Where the file system
// takes O_DIRECT, bytes go past the kernel's file cache, which host memory is too scarce for and which would be slower;
// elsewhere the cache is told after each transfer to drop what passed through it.
//
// A transfer is cut into pieces of which many are under way at once (memory/disk_channel.h), and the checksum of each
// range is computed meanwhile. What fails throws DiskError, when nothing is under way any more: the message names the
// folder, what was being done, and what is to be done about it.
//
//   DiskFile file("/nvme", num_bytes, {}, {{staging, staging_bytes}});
//   uint32_t crc = file.write({{data, offset, num_bytes}}).front();
//   file.read({{data, offset, num_bytes}}).front() == crc
//
// A transfer that is prepared needs no memory to run, so that on a thread of its own it fails for the disk alone:
//
//   const auto transfer = file.prepare(DiskDirection::kRead, ranges);
//   std::vector<uint32_t> crcs = file.run(*transfer);   // once
//
// One thread may write while another one reads, other ranges. Offsets, lengths and addresses are multiples of
// kAlignment.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "memory/disk_channel.h"

namespace patrickstar {

// What a disk is made to do by a test. A count of -1: never.
struct DiskFaults {
  std::atomic<int64_t> reads_before_error{-1};  // transfers of a piece; from then on all of them fail
  std::atomic<int64_t> writes_before_error{-1};
  std::atomic<int> error_number{5};            // EIO
  std::atomic<int64_t> reads_before_flip{-1};  // then a bit of one piece is read wrongly
  std::atomic<double> seconds_per_piece{0};    // a slow disk
  std::atomic<bool> cuts_short{false};         // every second piece is transferred in part
  std::atomic<bool> is_plain{false};  // a file system without O_TMPFILE, fallocate and O_DIRECT, when it is opened
};

struct DiskFileOptions {
  DiskIo io = DiskIo::kAuto;
  std::shared_ptr<DiskFaults> faults;  // null: none
};

struct DiskRange {
  void* data = nullptr;
  int64_t offset = 0;
  int64_t num_bytes = 0;
};

class DiskFile {
 public:
  static constexpr int64_t kAlignment = 4096;
  static int64_t round_up(int64_t num_bytes) { return (num_bytes + kAlignment - 1) / kAlignment * kAlignment; }

  // A file of `num_bytes` in `folder`. `registered`: memory that transfers will use. Throws DiskError when there is no
  // such folder, or no room in it.
  DiskFile(std::string folder, int64_t num_bytes, DiskFileOptions options, const std::vector<MemoryRange>& registered);
  ~DiskFile();
  DiskFile(const DiskFile&) = delete;
  DiskFile& operator=(const DiskFile&) = delete;

  class Transfer;

  // The ranges' CRC-32C each. Throw DiskError.
  std::vector<uint32_t> read(const std::vector<DiskRange>& ranges);
  std::vector<uint32_t> write(const std::vector<DiskRange>& ranges);
  // The same in two parts.
  std::shared_ptr<Transfer> prepare(DiskDirection direction, const std::vector<DiskRange>& ranges);
  std::vector<uint32_t> run(Transfer& transfer);

  const std::string& folder() const { return folder_; }
  int64_t num_bytes() const { return num_bytes_; }
  bool is_direct() const { return is_direct_; }
  // "io_uring with registered buffers, O_DIRECT".
  std::string how() const;

 private:
  struct Lane {
    DiskDirection direction;
    std::mutex mutex;
    std::unique_ptr<DiskChannel> channel;
  };
  bool is_plain() const;
  void open();
  void allocate();
  Lane& lane(DiskDirection direction) { return direction == DiskDirection::kRead ? reads_ : writes_; }
  void drop_from_cache(DiskDirection direction, const DiskRange& range);

  const std::string folder_;
  const int64_t num_bytes_;
  const DiskFileOptions options_;
  int fd_ = -1;
  bool is_direct_ = false;
  Lane reads_{DiskDirection::kRead, {}, {}};
  Lane writes_{DiskDirection::kWrite, {}, {}};
};

}  // namespace patrickstar
