// The dynamic map, which gives the codes of 8-bit states their values ([Note: states of 8 bits], kernels.h): data only,
// so that every implementation computes with the same constants.
#pragma once

#include <cstdint>

namespace patrickstar::optim {

constexpr int kMapSections = 8;

// The bits of 2^-100, the least scale.
constexpr uint32_t kLeastScaleBits = 0x0d800000u;

// A map is straight in sections. Entry j of section s has the value fma(j, slope[s], offset[s]); entries of section s <
// 7 are 10^(s-6) * (0.1 + 0.9 * (k + 0.5) / n) for k from 0 to n - 1, where n = 2^s (signed) or 2^(s+1) (unsigned), and
// begin with j = n. Section 7 is the one entry j = n of value 1. So s follows from the exponent of j as a float; values
// are looked up by the lowest three bits of its biased exponent.
//
// Encoding: x in [0, 1] belongs to the last section s whose start[s] <= x, a start being the middle between
// neighbouring entries; there j = round(min(fma(x, steps[s], first[s]), last[s])). The signed map has the negatives of
// steps, first and last, and gives -j as round(max(...)).
struct DynamicMap {
  float slope_by_exponent[kMapSections];
  float offset_by_exponent[kMapSections];
  float start[kMapSections];
  float steps[kMapSections];
  float first[kMapSections];
  float last[kMapSections];
};

// What is below these is taken for them: the signed map's entry is 0 at 2^-24, and the unsigned map's 2 at its value,
// the entry of all positive x below.
constexpr float kSignedLeast = 0x1p-24f;
constexpr float kUnsignedLeast = 0.325e-6f;

// The section of x, from kSignedLeast on, is guessed from its bits, as an integer: g = fma(bits, kGuessSlope,
// kGuessOffset) has it, or the one after it, in its last bits. (The bits of a float, less those of 1, are 2^23 times
// its binary logarithm less at most 0.0861. Floats near 1.5 * 2^23, whose last bits are zeros, are the integers; the
// slope is log10(2), but for what makes each guess right though the offset is an integer too.)
constexpr float kGuessSlope = static_cast<float>(0.2985 / (1 << 23));
constexpr float kGuessOffset = 0x1.8p23f - 31;

// `entries_of_first`: of section 0.
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
    // Between the last entry of this section, power * (1 - 0.45 / n), and the first of the next, which has twice as
    // many: power * (1 + 2.25 / n); or 1.
    map.start[s + 1] = static_cast<float>(s < 6 ? power * (1 + 0.9 / entries) : 1 - 0.225 / entries);
    entries *= 2;
    power = s < 5 ? power * 10 : 1;
  }
  map.first[7] = map.last[7] = static_cast<float>(entries);
  return map;
}

// Signed: code c has the magnitude of entry |c| and c's sign, but for -128, which is 1.
constexpr DynamicMap make_signed_map() {
  DynamicMap map = make_dynamic_map(1);
  // Of entry 128, whose sign is turned.
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

// Unsigned: code c is entry c + 1; entry 1 is zero and shares its place by exponent with entry 256, which is 1.
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
