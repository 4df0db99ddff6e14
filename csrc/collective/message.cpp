#include "collective/message.h"

#include "common/check.h"

namespace patrickstar {

namespace {

struct Head {
  uint64_t kind;
  uint64_t size;
  uint64_t count;
};

}  // namespace

void MessageWriter::add_head(uint8_t kind, uint64_t size, uint64_t count) {
  const Head head{kind, size, count};
  message_.append(reinterpret_cast<const char*>(&head), sizeof(head));
}

std::string MessageReader::next_text() {
  std::string text(check_head(detail::message_kind<char>(), sizeof(char), kAnyCount), '\0');
  read(text.data(), text.size());
  return text;
}

void MessageReader::finish() const { check(left() == 0, "bytes are left over"); }

void MessageReader::check(bool holds, const char* reason) const {
  PS_CHECK(holds, StateError, "another rank's message of ", what_, " is not what it should be (", reason, " in ",
           message_.size(), " bytes); run the same version of PatrickStar on all ranks, and report this");
}

size_t MessageReader::check_head(uint8_t kind, uint64_t size, uint64_t count) {
  Head head{};
  check(left() >= sizeof(head), "it ends early");
  read(&head, sizeof(head));
  check(head.kind == kind && head.size == size, "values of another kind");
  check(count == kAnyCount || head.count == count, "another number of values");
  check(head.count <= left() / size, "it ends early");
  return static_cast<size_t>(head.count);
}

void MessageReader::read(void* to, size_t num_bytes) {
  if (num_bytes > 0) std::memcpy(to, message_.data() + at_, num_bytes);
  at_ += num_bytes;
}

}  // namespace patrickstar
