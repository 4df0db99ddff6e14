// 8-bit optimizer states: the dynamic map of Dettmers et al. 2021 (arXiv 2110.02861; create_dynamic_map of
// bitsandbytes), signed for momentum and unsigned for variance. Every implementation uses these constants.
//
// Elements form blocks of kStateBlock that share a scale:
//
//   scale = the element of largest magnitude in the block, positive in a tie; inverse = 1 / scale
//   code = the entry nearest to x * inverse, by the operations below
//   x = map(code) * scale
//
// Unsigned map: only zero gets zero's code. A variance lost to zero makes its element's next update up to 1 / sqrt(1 -
// beta2) times too large, which distorts parameters more than all other roundings together
// (benchmark/results/cpu-eight-bit.txt). The published rule rounds to the nearest entry, which may be zero. Variances
// are encoded by their magnitudes.
//
// Signed map: the codes are bitsandbytes' codes less 127, so zero bytes mean zero. The scale has a sign. The map has an
// entry for 1 and none for -1, so a negative largest element would otherwise lose 0.7 %. With the sign, compressing
// expanded values gives the same codes and scales: float32 values in checkpoints represent the stored states exactly.
//
// A block whose largest magnitude is below 2^-100 is stored as zeros, because its least entries would be subnormal. A
// block with a NaN or an infinity gets a NaN scale and is all NaN from then on.
#pragma once

#include <cstdint>

namespace patrickstar::optim {

constexpr int kMapSections = 8;

// Bits of 2^-100, the least scale.
constexpr uint32_t kLeastScaleBits = 0x0d800000u;

// The map is piecewise linear. Entry j of section s has the value fma(j, slope[s], offset[s]). Section s < 7 begins at
// j = n, where n = 2^s (signed) or 2^(s+1) (unsigned). Its entries are 10^(s-6) * (0.1 + 0.9 * (k + 0.5) / n) for k
// from 0 to n - 1. Section 7 is the single entry j = n of value 1. The exponent of j as a float gives s; tables are
// indexed by the lowest three bits of its biased exponent.
//
// Encoding: x in [0, 1] belongs to the last section s with start[s] <= x, where a start is the midpoint between
// neighbouring entries. Then j = round(min(fma(x, steps[s], first[s]), last[s])). The signed map stores steps, first
// and last negated, and yields -j as round(max(...)).
struct DynamicMap {
  float slope_by_exponent[kMapSections];
  float offset_by_exponent[kMapSections];
  float start[kMapSections];
  float steps[kMapSections];
  float first[kMapSections];
  float last[kMapSections];
};

// Smaller values are raised to these. The signed map gives 0 for 2^-24; the unsigned map gives entry 2, the least
// positive value.
constexpr float kSignedLeast = 0x1p-24f;
constexpr float kUnsignedLeast = 0.325e-6f;

// Guess of the section of x >= kSignedLeast from its bits as an integer: the last bits of fma(bits, kGuessSlope,
// kGuessOffset) hold the section or the next one. (The bits of a float, less those of 1, are 2^23 times its binary
// logarithm, less at most 0.0861. Floats near 1.5 * 2^23 are the integers. The slope is log10(2), adjusted so that
// every guess is right with an integer offset.)
constexpr float kGuessSlope = static_cast<float>(0.2985 / (1 << 23));
constexpr float kGuessOffset = 0x1.8p23f - 31;

// `entries_of_first`: number of entries of section 0.
constexpr DynamicMap make_dynamic_map(int entries_of_first) {
  DynamicMap map{};
  double power = 1e-6;
  double entries = entries_of_first;
  for (int s = 0; s < 7; ++s) {
    const double slope = power * 0.9 / entries;
    const double offset = power * (0.1 - 0.9 + 0.45 / entries);
    const int exponent = (127 + s + (entries_of_first - 1)) % kMapSections;
    map.slope_by_exponent[exponent] = static_cast<float>(slope);
    map.offset_by_exponent[exponent] = static_cast<float>(offset);
    map.steps[s] = static_cast<float>(1 / slope);
    map.first[s] = static_cast<float>(-offset / slope);
    map.last[s] = static_cast<float>(2 * entries - 1);
    // Midpoint between this section's last entry, power * (1 - 0.45 / n), and the next one: power * (1 + 2.25 / n), or
    // 1.
    map.start[s + 1] = static_cast<float>(s < 6 ? power * (1 + 0.9 / entries) : 1 - 0.225 / entries);
    entries *= 2;
    power = s < 5 ? power * 10 : 1;
  }
  map.first[7] = map.last[7] = static_cast<float>(entries);
  return map;
}

// Signed: code c has the magnitude of entry |c| and the sign of c, except code -128, which is 1.
constexpr DynamicMap make_signed_map() {
  DynamicMap map = make_dynamic_map(1);
  // Entry 128, with its sign inverted.
  map.slope_by_exponent[(127 + 7) % kMapSections] = -1.0f / 128;
  map.offset_by_exponent[(127 + 7) % kMapSections] = 0;
  // Zero, and entry 1 of value 0.55e-6.
  map.steps[0] = static_cast<float>(1 / 0.55e-6);
  map.first[0] = 0;
  for (int s = 0; s < kMapSections; ++s) {
    map.steps[s] = -map.steps[s];
    map.first[s] = -map.first[s];
    map.last[s] = -map.last[s];
  }
  return map;
}

// Unsigned: code c is entry c + 1. Entry 1 is zero and shares its table place with entry 256, which is 1.
constexpr DynamicMap make_unsigned_map() {
  DynamicMap map = make_dynamic_map(2);
  map.slope_by_exponent[127 % kMapSections] = static_cast<float>(1.0 / 255);
  map.offset_by_exponent[127 % kMapSections] = -static_cast<float>(1.0 / 255);
  // Entry 1 (zero), and entries 2 and 3 of values 0.325e-6 and 0.775e-6.
  map.steps[0] = static_cast<float>(1 / 0.3875e-6);
  map.first[0] = static_cast<float>(1.5 - 0.1625 / 0.3875);
  return map;
}

constexpr DynamicMap kSignedMap = make_signed_map();
constexpr DynamicMap kUnsignedMap = make_unsigned_map();

}  // namespace patrickstar::optim
