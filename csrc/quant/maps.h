// The values of NF4 and dynamic-map codes (quant/kernels.h), shared by all implementations.
#pragma once

namespace patrickstar::quant {

constexpr float kLeastAbsmax = 1e-38f;
constexpr float kInt8Step = 7.874015718698502e-3f;  // 1 / 127, as bitsandbytes writes it

// Quantiles of the normal distribution (QLoRA, appendix E), with bitsandbytes' rounding.
struct Nf4Map {
  float values[16];
  float bounds[16];  // midpoints between neighbours; the last one is unused
};
constexpr Nf4Map make_nf4_map() {
  Nf4Map map{{-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
              -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
              0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f,
              0.7229568362236023f, 1.0f},
             {}};
  for (int i = 0; i < 15; ++i) map.bounds[i] = (map.values[i] + map.values[i + 1]) / 2;
  return map;
}
constexpr Nf4Map kNf4Map = make_nf4_map();

// The signed dynamic map (Dettmers et al. 2021, arXiv 2110.02861), ascending. The entries have the bits of
// bitsandbytes' create_dynamic_map(): midpoints of torch.linspace(0.1, 1, n + 1), times powers of ten.
struct DynamicMap {
  float values[256];
  float bounds[256];  // midpoints between neighbours; the last one is unused
};
constexpr float linspace_element(int index, int num_steps) {
  constexpr float kStart = 0.1f;
  const float step = (1.0f - kStart) / static_cast<float>(num_steps);
  // PyTorch counts from the nearer end, with one rounding.
  if (index < (num_steps + 1) / 2) {
    return static_cast<float>(static_cast<double>(kStart) + static_cast<double>(step) * index);
  }
  return static_cast<float>(1.0 - static_cast<double>(step) * (num_steps - index));
}
constexpr DynamicMap make_dynamic_map() {
  DynamicMap map{};
  constexpr float kPowers[7] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};
  constexpr int kZero = 127;  // index of value 0
  int above = kZero + 1;
  for (int section = 0; section < 7; ++section) {
    const int num_entries = 1 << section;
    for (int k = 0; k < num_entries; ++k, ++above) {
      const float middle = (linspace_element(k, num_entries) + linspace_element(k + 1, num_entries)) / 2;
      map.values[above] = kPowers[section] * middle;
      map.values[2 * kZero - above] = -map.values[above];
    }
  }
  map.values[255] = 1.0f;  // there is no -1
  for (int i = 0; i < 255; ++i) map.bounds[i] = (map.values[i] + map.values[i + 1]) / 2;
  return map;
}
constexpr DynamicMap kDynamicMap = make_dynamic_map();

}  // namespace patrickstar::quant
