// Forecast of the factor on the next step's gradients: bounds of the clipping coefficient, from the last steps.
//
// The coefficient is max_norm / norm where clipping acts, otherwise 1. If clipping did not act in the last steps, the
// forecast is exactly 1. Otherwise the norm is expected to change about as much as before: up to 1.5 times the largest
// of the last four changes, at least by 0.5 %, at most fourfold. Without a known change, the bound is a factor of 1.5.
// Wrong bounds cost time and change no number: the step recomputes scale-dependent values (optim/kernels.h).
//
//   ScaleForecast forecast;
//   ScaleBounds bounds = forecast.next(full_scale);   // least == most: clipping has not acted lately
//   forecast.note(max_norm / norm);                   // of the step
#pragma once

#include <cstdint>
#include <vector>

namespace patrickstar {

// Bounds of the factor on gradients, including the loss scale and the division of ranks' sums.
struct ScaleBounds {
  double least = 0;
  double most = 0;

  bool is_exact() const { return least == most; }
  bool contains(double scale) const { return least <= scale && scale <= most; }
};

class ScaleForecast {
 public:
  // `full_scale`: the factor without clipping.
  ScaleBounds next(double full_scale) const;
  // max_norm / norm: clipping acts below 1. Infinite without clipping.
  void note(double clip_ratio);

 private:
  std::vector<double> last_;  // logarithms of the last steps' ratios, oldest first
};

}  // namespace patrickstar
