// Sums of binary64 values that keep what their roundings lose.
//
// [Note: a sum that knows no order] Which partials of the gradients' squares a rank has depends on the chunk size, and
// their sum must not. So it is carried with its rounding errors (Knuth's two-sum), and right to some 100 bits before
// the last rounding. Those of one parameter are added up where they are: lane l of kSumLanes has partials l, l + lanes,
// l + 2*lanes, ..., in that order; then lanes are folded in halves. The host's bits are the device's.
//
//   WideSum sum;
//   sum.add(value);  sum.add(other);
//   double rounded = sum.value();
//
// Any thread may call.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define PS_HOST_DEVICE __host__ __device__
#else
#define PS_HOST_DEVICE
#endif

namespace patrickstar::optim {

struct WideSum {
  double high = 0;
  double low = 0;

  PS_HOST_DEVICE void add(double value) {
    const double sum = high + value;
    const double part = sum - high;
    low += (high - (sum - part)) + (value - part);
    high = sum;
  }
  PS_HOST_DEVICE void add(const WideSum& other) {
    add(other.high);
    add(other.low);
  }
  // Inf or NaN when any that was added is: low may be NaN where high is infinite.
  double value() const { return std::isfinite(high) ? high + low : high; }
};

// Of an array of partials, those of one parameter.
struct PartialsRange {
  int64_t first = 0;
  int64_t count = 0;
};

constexpr int kSumLanes = 256;

inline WideSum add_up(const double* partials, const PartialsRange& range) {
  std::array<WideSum, kSumLanes> lanes{};
  for (int64_t i = 0; i < range.count; ++i) lanes[static_cast<size_t>(i % kSumLanes)].add(partials[range.first + i]);
  for (size_t s = kSumLanes / 2; s > 0; s /= 2) {
    for (size_t lane = 0; lane < s; ++lane) lanes[lane].add(lanes[lane + s]);
  }
  return lanes[0];
}

}  // namespace patrickstar::optim
