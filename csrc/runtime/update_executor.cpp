#include "runtime/update_executor.h"

#include <cstring>

namespace patrickstar {

namespace {

constexpr double kMemory = 0.9;  // of what was measured, kept at each new measurement

}  // namespace

int64_t HostUpdate::numel() const {
  int64_t total = 0;
  for (const optim::AdamJob& job : jobs) total += job.range.numel;
  return total;
}

void restore_and_carry(const HostUpdate& update, optim::Compute& host_compute) {
  for (const Restore& restore : update.restores) {
    host_compute.cast_from_float(restore.in, restore.out, restore.dtype, restore.numel);
  }
  for (const Carry& carry : update.carries) {
    std::memcpy(carry.out, carry.in, static_cast<size_t>(carry.num_bytes));
  }
}

SpanLabel update_label(Track track, ChunkId first_chunk, const std::vector<optim::AdamJob>& jobs) {
  SpanLabel label{track, StallCause::kNone, {first_chunk, ArrayKind::kMaster}};
  for (const optim::AdamJob& job : jobs) label.numel += job.range.numel;
  return label;
}

HostSpanScope::HostSpanScope(HostSpan* span) : span_(span) {
  if (span_ != nullptr) span_->begin = TraceClock::now();
}

HostSpanScope::~HostSpanScope() {
  if (span_ == nullptr) return;
  span_->end = TraceClock::now();
  span_->ran = true;
}

void UpdateRate::submitted(int64_t numel) {
  const std::lock_guard<std::mutex> lock(mutex_);
  waiting_ += numel;
}

void UpdateRate::finished(int64_t numel, double seconds) {
  const std::lock_guard<std::mutex> lock(mutex_);
  waiting_ -= numel;
  if (seconds <= 0) return;
  params_ = kMemory * params_ + static_cast<double>(numel);
  seconds_ = kMemory * seconds_ + seconds;
}

double UpdateRate::params_per_second() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return seconds_ > 0 ? params_ / seconds_ : first_guess_;
}

bool UpdateRate::is_busy() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return waiting_ > 0;
}

double UpdateRate::seconds_until_done(int64_t numel) const {
  const double rate = params_per_second();
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<double>(waiting_ + numel) / rate;
}

}  // namespace patrickstar
