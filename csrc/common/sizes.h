// Formats amounts of memory for messages, as patrickstar/sizes.py does. Every command and key accepts them.
//
//   show_exactly(1610612737)   // "1.5 GiB (1610612737 bytes)"
//   show_enough(1610612737)    // "1.51GiB (1610612737 bytes)"
#pragma once

#include <cstdint>
#include <string>

namespace patrickstar {

// With a unit and about three digits, and the bytes in brackets where they differ. At least 0.
std::string show_exactly(int64_t num_bytes);

// For a setting or flag: rounded up to hundredths of the unit.
std::string show_enough(int64_t num_bytes);

}  // namespace patrickstar
