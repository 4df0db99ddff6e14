// Serialised messages between ranks: consecutive values, each with its kind, size and count.
//
// A reader throws StateError if kind, size or count differ from the expected ones, or if bytes are missing or left. A
// message of another call or version is thus never misread. Any thread.
//
//   const std::string message = MessageWriter().add(int64_t{3}).add(activation memory).str();
//   MessageReader reader(message, "the ranks' activation memory");
//   const auto count = reader.next<int64_t>();
//   const auto activation memory = reader.next_list<int64_t>();
//   reader.finish();
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace patrickstar {

namespace detail {

// The kind of a value's bits, so that an int64_t is not read as a double.
template <typename Value>
constexpr uint8_t message_kind() {
  static_assert(std::is_trivially_copyable_v<Value>, "values travel as they are");
  if constexpr (std::is_floating_point_v<Value>) return 'f';
  if constexpr (std::is_enum_v<Value>) return 'e';
  if constexpr (std::is_integral_v<Value>) return std::is_signed_v<Value> ? 'i' : 'u';
  return 's';
}

}  // namespace detail

class MessageWriter {
 public:
  template <typename Value>
  MessageWriter& add(const Value& value) {
    return add_values(&value, 1);
  }
  template <typename Value>
  MessageWriter& add(const std::vector<Value>& values) {
    return add_values(values.data(), values.size());
  }
  MessageWriter& add(const std::string& text) { return add_values(text.data(), text.size()); }

  std::string str() && { return std::move(message_); }
  const std::string& str() const& { return message_; }

 private:
  template <typename Value>
  MessageWriter& add_values(const Value* values, size_t count) {
    add_head(detail::message_kind<Value>(), sizeof(Value), count);
    message_.append(reinterpret_cast<const char*>(values), count * sizeof(Value));
    return *this;
  }
  void add_head(uint8_t kind, uint64_t size, uint64_t count);

  std::string message_;
};

class MessageReader {
 public:
  // `message` must outlive the reader. `what` names the message in errors.
  MessageReader(const std::string& message, const char* what) : message_(message), what_(what) {}

  template <typename Value>
  Value next() {
    Value value;
    read(&value, check_head(detail::message_kind<Value>(), sizeof(Value), 1) * sizeof(Value));
    return value;
  }
  template <typename Value>
  std::vector<Value> next_list() {
    std::vector<Value> values(check_head(detail::message_kind<Value>(), sizeof(Value), kAnyCount));
    read(values.data(), values.size() * sizeof(Value));
    return values;
  }
  // Throws unless the list has exactly `count` values.
  template <typename Value>
  std::vector<Value> next_list(size_t count) {
    std::vector<Value> values(check_head(detail::message_kind<Value>(), sizeof(Value), count));
    read(values.data(), values.size() * sizeof(Value));
    return values;
  }
  std::string next_text();
  // Throws if bytes are left.
  void finish() const;
  // Throws StateError with `reason` unless `holds`.
  void check(bool holds, const char* reason) const;

 private:
  static constexpr uint64_t kAnyCount = UINT64_MAX;

  // Returns the number of values that follow; their bytes are present.
  size_t check_head(uint8_t kind, uint64_t size, uint64_t count);
  void read(void* to, size_t num_bytes);
  size_t left() const { return message_.size() - at_; }

  const std::string& message_;
  const char* what_;
  size_t at_ = 0;
};

}  // namespace patrickstar
