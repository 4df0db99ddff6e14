// A 64-bit hash (FNV-1a) of a sequence of integers, by which ranks compare data.
//
//   Fingerprint fingerprint;
//   for (int64_t value : values) fingerprint.add(value);
//   fingerprint.value()
#pragma once

#include <cstdint>

namespace patrickstar {

class Fingerprint {
 public:
  void add(int64_t value) {
    for (int shift = 0; shift < 64; shift += 8) {
      hash_ = (hash_ ^ (static_cast<uint64_t>(value) >> shift & 0xff)) * 1099511628211ull;
    }
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 14695981039346656037ull;
};

}  // namespace patrickstar
