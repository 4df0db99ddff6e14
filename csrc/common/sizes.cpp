#include "common/sizes.h"

#include "common/check.h"

namespace patrickstar {

namespace {

struct Unit {
  const char* name;
  int64_t num_bytes;
};

constexpr int64_t kLeastTib = int64_t{10} << 40;  // below it, GiB are easier to compare

Unit unit_for(int64_t num_bytes) {
  if (num_bytes >= kLeastTib) return {"TiB", int64_t{1} << 40};
  for (const Unit& unit : {Unit{"GiB", 1 << 30}, Unit{"MiB", 1 << 20}, Unit{"KiB", 1 << 10}}) {
    if (num_bytes >= unit.num_bytes) return unit;
  }
  return {"bytes", 1};
}

// A number of units: `count` parts, of which `per_unit` (1, 10 or 100) are one.
struct Parts {
  int64_t count;
  int64_t per_unit;

  // Without zeros at the end.
  std::string text() const {
    std::string digits = std::to_string(count % per_unit + per_unit).substr(1);
    while (!digits.empty() && digits.back() == '0') digits.pop_back();
    return std::to_string(count / per_unit) + (digits.empty() ? "" : ".") + digits;
  }
  bool are(int64_t num_bytes, const Unit& unit) const {
    return num_bytes / unit.num_bytes == count / per_unit &&
           num_bytes % unit.num_bytes == count % per_unit * unit.num_bytes / per_unit;
  }
};

// Halves to even.
Parts nearest(int64_t num_bytes, const Unit& unit) {
  const int64_t per_unit = num_bytes >= 100 * unit.num_bytes ? 1 : num_bytes >= 10 * unit.num_bytes ? 10 : 100;
  const int64_t parts = num_bytes * per_unit;
  const int64_t below = parts / unit.num_bytes;
  const int64_t rest = 2 * (parts % unit.num_bytes);
  const bool is_up = rest > unit.num_bytes || (rest == unit.num_bytes && below % 2 == 1);
  return {below + (is_up ? 1 : 0), per_unit};
}

Parts rounded_up(int64_t num_bytes, const Unit& unit) {
  const int64_t rest = 100 * (num_bytes % unit.num_bytes);
  return {100 * (num_bytes / unit.num_bytes) + (rest + unit.num_bytes - 1) / unit.num_bytes, 100};
}

std::string with_bytes(const std::string& shown, bool is_exact, int64_t num_bytes) {
  return is_exact ? shown : detail::join(shown, " (", num_bytes, " bytes)");
}

}  // namespace

std::string show_exactly(int64_t num_bytes) {
  const Unit unit = unit_for(num_bytes);
  const Parts parts = nearest(num_bytes, unit);
  return with_bytes(parts.text() + " " + unit.name, parts.are(num_bytes, unit), num_bytes);
}

std::string show_enough(int64_t num_bytes) {
  const Unit unit = unit_for(num_bytes);
  if (unit.num_bytes == 1) return std::to_string(num_bytes) + "B";
  const Parts parts = rounded_up(num_bytes, unit);
  return with_bytes(parts.text() + unit.name, parts.are(num_bytes, unit), num_bytes);
}

}  // namespace patrickstar
