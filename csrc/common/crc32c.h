// CRC-32C (Castagnoli, as in iSCSI, RFC 3720): the checksum of checkpoints. With SSE 4.2 three streams run through the
// crc32 instruction at once, since one alone waits for its latency; elsewhere tables, eight bytes at a time. Both give
// the same number. Pure functions; any thread.
//
//   uint32_t crc = crc32c(0, "123456789", 9);     // 0xe3069283
//   crc = crc32c(crc, more, num_bytes);           // of both, one after the other
#pragma once

#include <cstddef>
#include <cstdint>

namespace patrickstar {

// The checksum of bytes that begin with those of checksum `crc` (0: none) and go on with `data`.
uint32_t crc32c(uint32_t crc, const void* data, size_t num_bytes);

// The same by tables, on any processor.
uint32_t crc32c_portable(uint32_t crc, const void* data, size_t num_bytes);

}  // namespace patrickstar
