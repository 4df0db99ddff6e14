// CRC-32C (Castagnoli, RFC 3720), the checksum of checkpoints. With SSE 4.2 three streams hide the latency of the crc32
// instruction; otherwise tables process eight bytes at a time. Pure functions; any thread.
//
//   uint32_t crc = crc32c(0, "123456789", 9);     // 0xe3069283
//   crc = crc32c(crc, more, num_bytes);           // continues
//   crc = joined_crc32c(crc, other, num_bytes);   // the same, from the checksum of `more` alone
#pragma once

#include <cstddef>
#include <cstdint>

namespace patrickstar {

// Continues the checksum `crc` (0 at the start) with `data`.
uint32_t crc32c(uint32_t crc, const void* data, size_t num_bytes);

// The checksum of bytes with checksum `first`, followed by `second_bytes` bytes with checksum `second`.
uint32_t joined_crc32c(uint32_t first, uint32_t second, int64_t second_bytes);

// The table version, for any processor.
uint32_t crc32c_portable(uint32_t crc, const void* data, size_t num_bytes);

}  // namespace patrickstar
