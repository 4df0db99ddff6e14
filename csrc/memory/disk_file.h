// A file on a disk as memory for arrays: ranges of bytes that are written and read back.
//
// - The file has no name, so nothing is left behind when the process ends.
// - All bytes are allocated at once, so a full disk is detected before the first step.
// - With O_DIRECT, bytes bypass the kernel's file cache. Otherwise the cache is dropped after each transfer.
// - A transfer is cut into pieces, many in flight at once (memory/disk_channel.h); checksums are computed meanwhile.
// - Failures throw DiskError after all transfers have ended. The message names folder, operation and remedy.
//
//   DiskFile file("/nvme", num_bytes, {}, {{staging, staging_bytes}});
//   uint32_t crc = file.write({{data, offset, num_bytes}}).front();
//   file.read({{data, offset, num_bytes}}).front() == crc
//
// A prepared transfer allocates nothing when it runs, so on a thread of its own only the disk can fail:
//
//   const auto transfer = file.prepare(DiskDirection::kRead, ranges);
//   std::vector<uint32_t> crcs = file.run(*transfer);   // once
//
// One thread may write while another reads other ranges. Offsets, lengths and addresses are multiples of kAlignment.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/types.h"
#include "memory/disk_channel.h"

namespace patrickstar {

// Faults that tests inject. A count of -1: never.
struct DiskFaults : std::enable_shared_from_this<DiskFaults> {
  std::atomic<int64_t> reads_before_error{-1};  // pieces; all later ones fail
  std::atomic<int64_t> writes_before_error{-1};
  std::atomic<int> error_number{5};            // EIO
  std::atomic<int64_t> reads_before_flip{-1};  // then one bit of a piece is flipped
  std::atomic<double> seconds_per_piece{0};    // a slow disk
  std::atomic<bool> cuts_short{false};         // every second piece is transferred partially
  std::atomic<bool> is_plain{false};           // at opening: no O_TMPFILE, fallocate or O_DIRECT
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
  static int64_t round_up(int64_t num_bytes) { return patrickstar::round_up(num_bytes, kAlignment); }

  // `registered`: memory that transfers will use. Throws DiskError if `folder` does not exist or has no room.
  DiskFile(std::string folder, int64_t num_bytes, DiskFileOptions options, const std::vector<MemoryRange>& registered);
  ~DiskFile();
  DiskFile(const DiskFile&) = delete;
  DiskFile& operator=(const DiskFile&) = delete;

  class Transfer;

  // Return the CRC-32C of each range. Throw DiskError.
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
