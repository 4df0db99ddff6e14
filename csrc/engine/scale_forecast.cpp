#include "engine/scale_forecast.h"

#include <algorithm>
#include <cmath>

namespace patrickstar {

namespace {

// Explained in scale_forecast.h. None of these is measured.
constexpr size_t kNumChanges = 4;
constexpr double kForecastCaution = 1.5;
constexpr double kLeastChange = 0.005;
const double kFirstChange = std::log(1.5);
const double kMostChange = std::log(4.0);

}  // namespace

ScaleBounds ScaleForecast::next(double full_scale) const {
  const bool acted = std::any_of(last_.begin(), last_.end(), [](double value) { return value < 0; });
  if (!acted) return {full_scale, full_scale};
  double change = last_.size() == 1 ? kFirstChange : 0;
  for (size_t i = 1; i < last_.size(); ++i) change = std::max(change, std::abs(last_[i] - last_[i - 1]));
  change = std::clamp(kForecastCaution * change, kLeastChange, kMostChange);
  const auto scale = [&](double ratio) { return ratio < 0 ? full_scale * std::exp(ratio) : full_scale; };
  return {scale(last_.back() - change), scale(last_.back() + change)};
}

void ScaleForecast::note(double clip_ratio) {
  if (std::isinf(clip_ratio)) last_.clear();
  if (!std::isfinite(clip_ratio) || !(clip_ratio > 0)) return;
  last_.push_back(std::log(clip_ratio));
  if (last_.size() > kNumChanges + 1) last_.erase(last_.begin());
}

}  // namespace patrickstar
