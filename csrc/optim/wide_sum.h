// A sum of binary64 values that keeps its rounding errors (Knuth's two-sum), accurate to some 100 bits before the final
// rounding.
//
// The chunk size determines which partials of the squared gradients a rank has, and must not change their sum. Partials
// of one parameter are added where they are: lane l of kSumLanes takes partials l, l + lanes, l + 2*lanes, ... in this
// order, then lanes are added in halves. Host and device give the same bits. Any thread.
//
//   WideSum sum;
//   sum.add(value);  sum.add(other);
//   double rounded = sum.value();
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
  // Inf or NaN if any summand is; low may be NaN when high is infinite.
  double value() const { return std::isfinite(high) ? high + low : high; }
};

// The partials of one parameter in an array.
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
