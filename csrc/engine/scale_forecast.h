// What the next step's gradients are probably multiplied by: bounds of the clipping coefficient, from the last steps'.
//
// Where clipping does not act the coefficient is 1, and so it is expected to be; where it does, it is the ratio of the
// largest norm allowed to that of the gradients, which is known when backward is over. From one step to the next the
// norm changes about as it did before: so it is looked for within 1.5 times the largest of the last four changes, at
// least
// 0.5 %, at most fourfold; within a factor of 1.5 while no change is known. Wrong bounds cost time, and change no
// number ([Note: settled values], optim/kernels.h).
//
//   ScaleForecast forecast;
//   ScaleBounds bounds = forecast.next(full_scale);   // least == most: clipping has not acted of late
//   forecast.note(max_norm / norm);                   // of the step
#pragma once

#include <cstdint>
#include <vector>

namespace patrickstar {

// Of the factor on gradients: with loss scale, and with what ranks' sums are divided by.
struct ScaleBounds {
  double least = 0;
  double most = 0;

  bool is_exact() const { return least == most; }
  bool contains(double scale) const { return least <= scale && scale <= most; }
};

class ScaleForecast {
 public:
  // `full_scale`: the factor where clipping does not act.
  ScaleBounds next(double full_scale) const;
  // The largest norm allowed over that of the gradients: clipping acts below 1. Infinite where nothing is clipped.
  void note(double clip_ratio);

 private:
  std::vector<double> last_;  // logarithms of the last steps' ratios, the latest last
};

}  // namespace patrickstar
