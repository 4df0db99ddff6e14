#include "common/crc32c.h"

#include <array>
#include <cstring>

namespace patrickstar {

namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected
using ByteTable = std::array<uint32_t, 256>;

// tables[k][b]: the register after byte b and k zero bytes.
std::array<ByteTable, 8> make_byte_tables() {
  std::array<ByteTable, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (kPolynomial & (0u - (value & 1)));
    tables[0][byte] = value;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t value = tables[k - 1][byte];
      tables[k][byte] = (value >> 8) ^ tables[0][value & 0xff];
    }
  }
  return tables;
}

const std::array<ByteTable, 8>& byte_tables() {
  static const std::array<ByteTable, 8> tables = make_byte_tables();
  return tables;
}

uint64_t load(const unsigned char* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

// Returns the register after the bytes.
uint32_t run_portable(uint32_t value, const unsigned char* bytes, size_t num_bytes) {
  const std::array<ByteTable, 8>& tables = byte_tables();
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  for (; num_bytes >= 8; bytes += 8, num_bytes -= 8) {
    const uint64_t word = load(bytes) ^ value;
    value = 0;
    for (size_t k = 0; k < 8; ++k) value ^= tables[7 - k][(word >> (8 * k)) & 0xff];
  }
#endif
  for (; num_bytes > 0; ++bytes, --num_bytes) value = (value >> 8) ^ tables[0][(value ^ *bytes) & 0xff];
  return value;
}

// Product of two polynomials modulo kPolynomial; the highest bit is the coefficient of x^0.
uint32_t product(uint32_t one, uint32_t other) {
  uint32_t result = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if (one & bit) result ^= other;
    other = (other >> 1) ^ (kPolynomial & (0u - (other & 1)));
  }
  return result;
}

#if defined(__x86_64__)

// Effect of `num_bytes` zero bytes on a register. The effect is linear: one table per byte of the register. It shifts
// one stream's register past the next stream's bytes.
class ZeroBytes {
 public:
  explicit ZeroBytes(size_t num_bytes) {
    const ByteTable& byte_table = byte_tables()[0];
    std::array<uint32_t, 32> of_bit{};
    for (size_t bit = 0; bit < 32; ++bit) {
      uint32_t value = 1u << bit;
      for (size_t i = 0; i < num_bytes; ++i) value = (value >> 8) ^ byte_table[value & 0xff];
      of_bit[bit] = value;
    }
    for (size_t place = 0; place < 4; ++place) {
      for (size_t byte = 0; byte < 256; ++byte) {
        uint32_t value = 0;
        for (size_t bit = 0; bit < 8; ++bit) value ^= (byte >> bit) & 1 ? of_bit[8 * place + bit] : 0;
        tables_[place][byte] = value;
      }
    }
  }

  uint32_t after(uint32_t value) const {
    return tables_[0][value & 0xff] ^ tables_[1][(value >> 8) & 0xff] ^ tables_[2][(value >> 16) & 0xff] ^
           tables_[3][value >> 24];
  }

 private:
  std::array<ByteTable, 4> tables_{};
};

// Consumes three adjacent stretches of `stretch` bytes at a time while enough bytes are left.
__attribute__((target("sse4.2"))) uint32_t run_three(uint32_t value, const unsigned char*& bytes, size_t& num_bytes,
                                                     size_t stretch, const ZeroBytes& skip) {
  for (; num_bytes >= 3 * stretch; bytes += 3 * stretch, num_bytes -= 3 * stretch) {
    uint64_t first = value, second = 0, third = 0;
    for (size_t at = 0; at < stretch; at += 8) {
      first = __builtin_ia32_crc32di(first, load(bytes + at));
      second = __builtin_ia32_crc32di(second, load(bytes + stretch + at));
      third = __builtin_ia32_crc32di(third, load(bytes + 2 * stretch + at));
    }
    const uint32_t both = skip.after(static_cast<uint32_t>(first)) ^ static_cast<uint32_t>(second);
    value = skip.after(both) ^ static_cast<uint32_t>(third);
  }
  return value;
}

__attribute__((target("sse4.2"))) uint32_t run_sse42(uint32_t value, const unsigned char* bytes, size_t num_bytes) {
  constexpr size_t kLong = 8192, kShort = 256;  // bytes; a multiple of 8
  static const ZeroBytes skip_long(kLong), skip_short(kShort);
  value = run_three(value, bytes, num_bytes, kLong, skip_long);
  value = run_three(value, bytes, num_bytes, kShort, skip_short);
  uint64_t rest = value;
  for (; num_bytes >= 8; bytes += 8, num_bytes -= 8) rest = __builtin_ia32_crc32di(rest, load(bytes));
  value = static_cast<uint32_t>(rest);
  for (; num_bytes > 0; ++bytes, --num_bytes) value = __builtin_ia32_crc32qi(value, *bytes);
  return value;
}

#endif

}  // namespace

uint32_t crc32c(uint32_t crc, const void* data, size_t num_bytes) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return ~run_sse42(~crc, static_cast<const unsigned char*>(data), num_bytes);
#endif
  return crc32c_portable(crc, data, num_bytes);
}

// Zero bytes multiply a register by x^8 each. The inversions of both checksums cancel out.
uint32_t joined_crc32c(uint32_t first, uint32_t second, int64_t second_bytes) {
  uint32_t power = 1u << 23;  // x^8
  for (int64_t count = second_bytes; count > 0; count >>= 1) {
    if (count & 1) first = product(first, power);
    power = product(power, power);
  }
  return first ^ second;
}

uint32_t crc32c_portable(uint32_t crc, const void* data, size_t num_bytes) {
  return ~run_portable(~crc, static_cast<const unsigned char*>(data), num_bytes);
}

}  // namespace patrickstar
