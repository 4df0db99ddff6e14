#include "optim/scale_dependent_store.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace patrickstar::optim {

namespace {

constexpr double kMoreThanItsShare = 1.5;
constexpr int64_t kAlignmentBytes = 64;

}  // namespace

void ScaleDependentStore::set_memory(std::vector<Memory> memory) {
  const std::lock_guard<std::mutex> lock(mutex_);
  memory_ = std::move(memory);
  current_ = memory_.size();
}

void ScaleDependentStore::begin(int64_t numel) {
  const std::lock_guard<std::mutex> lock(mutex_);
  current_ = 0;
  used_ = 0;
  coming_numel_ = numel;
}

void ScaleDependentStore::begin_chunk(int64_t numel) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const double share = static_cast<double>(numel) / static_cast<double>(std::max(coming_numel_, numel));
  allowance_ = static_cast<int64_t>(std::min(1.0, kMoreThanItsShare * share) * static_cast<double>(left_bytes()));
  coming_numel_ -= numel;
}

int64_t ScaleDependentStore::left_bytes() const {
  int64_t left = -used_;
  for (size_t i = current_; i < memory_.size(); ++i) left += memory_[i].num_bytes;
  return std::max<int64_t>(left, 0);
}

char* ScaleDependentStore::take(int64_t num_bytes) {
  const int64_t taken = (num_bytes + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (taken > allowance_) return nullptr;
  while (current_ < memory_.size() && used_ + taken > memory_[current_].num_bytes) {
    ++current_;
    used_ = 0;
  }
  if (current_ == memory_.size()) return nullptr;
  allowance_ -= taken;
  used_ += taken;
  return memory_[current_].data + used_ - taken;
}

ScaleDependentValues ScaleDependentStore::keep(const ScaleDependentValues& dependent) {
  if (dependent.count == 0 || dependent.count == ScaleDependentValues::kAll) return {dependent.count};
  char* const data = take(dependent.count * ScaleDependentValues::kBytes);
  if (data == nullptr) return {ScaleDependentValues::kAll};
  ScaleDependentValues kept = ScaleDependentValues::in(data, dependent.count);
  const auto copy = [&dependent](auto* to, const auto* from) {
    std::memcpy(to, from, static_cast<size_t>(dependent.count) * sizeof(*to));
  };
  copy(kept.master, dependent.master);
  copy(kept.momentum, dependent.momentum);
  copy(kept.variance, dependent.variance);
  copy(kept.grad, dependent.grad);
  copy(kept.index, dependent.index);
  kept.count = dependent.count;
  return kept;
}

}  // namespace patrickstar::optim
