// Groups on the CPU: pairwise messages of a torch.distributed group (gloo), all in flight at once.
//
// Pairwise messages instead of gloo's collectives: they need no second copy of the chunk, they can be aborted, and an
// error can name the rank of the failed message. Messages of different groups use different connections. Within a group
// the tag counts the collectives.
//
// A control group's exchange has two rounds: heads of one fixed size (the call, the purpose, the value's length), then
// the values.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>

#include "collective/communicator.h"
#include "collective/rank_mean.h"
#include "common/check.h"
#include "torch_api/attached_torch.h"

namespace patrickstar {

namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

constexpr Milliseconds kNoTimeout{0};

std::unique_ptr<TorchGroup> cpu_group(const std::string& group_name) {
  TorchGroup* group = nullptr;
  try {
    group = torch_api().open_group(group_name.c_str());
  } catch (const std::exception& error) {
    const std::string text = error.what();
    throw ArgumentError(detail::join("torch.distributed has no group \"", group_name, "\" for the CPU (",
                                     text.substr(0, text.find('\n')),
                                     "); pass the group_name of one made with backend=\"gloo\""));
  }
  PS_CHECK(group != nullptr, StateError,
           "this PyTorch has no torch.distributed with gloo, so there are no groups of ranks on the CPU; install one "
           "that has");
  return std::unique_ptr<TorchGroup>(group);
}

// Shortens "...gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234. This may ..." to the reason.
std::string reason_of(const std::exception& error) {
  std::string text = error.what();
  text = text.substr(0, text.find('\n'));
  const size_t place = text.find(".cc:");
  const size_t start = place == std::string::npos ? place : text.find("] ", place);
  if (start != std::string::npos) text = text.substr(start + 2);
  return text.substr(0, text.find(". "));
}

// One round of messages between all ranks of a group. One thread at a time; any thread may call abort().
class PeerMessages {
 public:
  PeerMessages(const std::string& group_name, Milliseconds timeout, const Members& members)
      : group_(cpu_group(group_name)),
        group_name_(group_name),
        members_(members),
        rank_(group_->rank()),
        size_(group_->size()),
        timeout_(timeout) {
    check_members(members_, size_);
  }

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Sends mine(peer) to every other rank and receives theirs(peer) from it. Both return a pair of address and number of
  // bytes; ranks agree on each length. `what` names the round in errors.
  template <class Mine, class Theirs>
  void exchange(const char* what, const Mine& mine, const Theirs& theirs) {
    const auto started = Clock::now();
    begin(what, started);
    std::vector<Message> messages;
    // Starts at the next rank, so that ranks do not all send to the same rank at once.
    for (int step = 1; step < size(); ++step)
      post(messages, what, at_peer((rank() + step) % size(), theirs), &TorchGroup::receive);
    for (int step = 1; step < size(); ++step)
      post(messages, what, at_peer((rank() + step) % size(), mine), &TorchGroup::send);
    for (Message& message : messages) finish(message, what, started);
    end();
  }

  // Any list of messages. gloo matches messages of two ranks and one tag in the order of posting.
  void exchange(const char* what, const std::vector<PeerBytes>& sends, const std::vector<PeerBytes>& receives) {
    const auto started = Clock::now();
    begin(what, started);
    std::vector<Message> messages;
    for (const PeerBytes& bytes : receives) post(messages, what, bytes, &TorchGroup::receive);
    for (const PeerBytes& bytes : sends) post(messages, what, bytes, &TorchGroup::send);
    for (Message& message : messages) finish(message, what, started);
    end();
  }

  void abort() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.empty()) failure_ = "the group was aborted on this rank";
    for (const auto& work : running_) work->abort();
  }
  void check() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_.empty()) throw RankFailure(failure_);
  }
  void close() {
    abort();
    const std::lock_guard<std::mutex> lock(mutex_);
    is_closed_ = true;
    running_.clear();
    group_.reset();
  }
  double running_seconds() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return is_running_ ? std::chrono::duration<double>(Clock::now() - started_).count() : 0.0;
  }

 private:
  struct Message {
    std::shared_ptr<TorchMessage> work;
    int peer;
  };

  void begin(const char* what, Clock::time_point now) {
    const std::lock_guard<std::mutex> lock(mutex_);
    PS_CHECK(!is_running_, StateError, "group ", group_name_, " is in a collective already and another thread began ",
             what, "; a communicator serves one thread at a time");
    PS_CHECK(!is_closed_, StateError, "group ", group_name_, " is closed, and ", what, " was called");
    if (!failure_.empty()) throw RankFailure(failure_);
    is_running_ = true;
    started_ = now;
    tag_ = (tag_ + 1) & 0x3fffffff;
  }
  void end() {
    const std::lock_guard<std::mutex> lock(mutex_);
    running_.clear();
    is_running_ = false;
  }
  [[noreturn]] void fail(const char* what, int peer, const std::string& why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.empty()) {
      const int here = members_.empty() ? rank() : members_.at(static_cast<size_t>(rank()));
      failure_ = detail::join(describe_member(members_, peer, size()), " failed rank ", here, " in ", what, ": ", why);
    }
    running_.clear();
    is_running_ = false;
    throw RankFailure(failure_);
  }

  template <class Buffer>
  static PeerBytes at_peer(int peer, const Buffer& buffer) {
    const auto [address, num_bytes] = buffer(peer);
    return {peer, address, num_bytes};
  }
  void post(std::vector<Message>& messages, const char* what, const PeerBytes& bytes,
            TorchMessage* (TorchGroup::*start)(void*, int64_t, int, int)) {
    if (bytes.num_bytes == 0) return;
    try {
      std::shared_ptr<TorchMessage> work((group_.get()->*start)(bytes.address, bytes.num_bytes, bytes.peer, tag_));
      messages.push_back({std::move(work), bytes.peer});
    } catch (const std::exception& error) {
      fail(what, bytes.peer, reason_of(error));
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    running_.push_back(messages.back().work);
    if (!failure_.empty()) messages.back().work->abort();
  }

  void finish(Message& message, const char* what, Clock::time_point started) {
    bool completed = false;
    try {
      completed = message.work->wait(remaining(started).count());
    } catch (const std::exception& error) {
      const bool late = std::string(error.what()).find("Timed out") != std::string::npos;
      const auto seconds = std::chrono::duration<double>(Clock::now() - started).count();
      fail(what, message.peer, late ? detail::join("it did not take part within ", seconds, " s") : reason_of(error));
    }
    if (!completed) fail(what, message.peer, "aborted");
  }
  Milliseconds remaining(Clock::time_point started) const {
    if (timeout_ == kNoTimeout) return kNoTimeout;
    const auto passed = std::chrono::duration_cast<Milliseconds>(Clock::now() - started);
    return std::max(timeout_ - passed, Milliseconds(1));
  }

  std::unique_ptr<TorchGroup> group_;
  std::string group_name_;
  Members members_;
  int rank_;
  int size_;
  Milliseconds timeout_;  // of a whole round; kNoTimeout: the group's own, per message
  int tag_ = 0;
  std::mutex mutex_;  // guards the rest
  std::vector<std::shared_ptr<TorchMessage>> running_;
  Clock::time_point started_;
  bool is_running_ = false;
  bool is_closed_ = false;
  std::string failure_;
};

class C10dCommunicator final : public Communicator {
 public:
  C10dCommunicator(const std::string& group_name, const Members& members)
      : messages_(group_name, kNoTimeout, members) {}

  int rank() const override { return messages_.rank(); }
  int size() const override { return messages_.size(); }

  void all_gather(void* whole, int64_t shard_bytes) override {
    const auto shard = [&](int r) { return std::pair(static_cast<char*>(whole) + r * shard_bytes, shard_bytes); };
    messages_.exchange("all_gather", [&](int) { return shard(rank()); }, shard);
  }

  void reduce_scatter_mean(void* whole, void* shard, void* scratch, int64_t shard_numel, DType dtype) override {
    const int64_t shard_bytes = shard_numel * element_size(dtype);
    const auto place = [&](void* base, int r) { return static_cast<char*>(base) + r * shard_bytes; };
    messages_.exchange(
        "reduce_scatter_mean", [&](int r) { return std::pair(place(whole, r), shard_bytes); },
        [&](int r) { return std::pair(place(scratch, r), shard_bytes); });
    std::memcpy(place(scratch, rank()), place(whole, rank()), static_cast<size_t>(shard_bytes));
    mean_of_ranks(scratch, size(), shard, dtype, shard_numel);
  }

  void exchange(const std::vector<PeerBytes>& sends, const std::vector<PeerBytes>& receives) override {
    check_exchange(*this, sends, receives);
    messages_.exchange("exchange", sends, receives);
  }

  void abort() override { messages_.abort(); }
  void check() override { messages_.check(); }
  double oldest_pending_seconds() override { return messages_.running_seconds(); }
  void close() override { messages_.close(); }

 private:
  PeerMessages messages_;
};

using Name = std::array<char, ControlGroup::kMaxName + 1>;

Name name_of(const std::string& text) {
  Name name{};
  text.copy(name.data(), ControlGroup::kMaxName);
  return name;
}

// Sent before the value of an exchange.
struct ExchangeHead {
  int64_t num_bytes;  // of the value
  Name call;
  Name what;
};

std::string describe(const ExchangeHead& head) {
  const std::string what = head.what.data();
  const std::string call = head.call[0] == '\0' ? "between two calls" : detail::join("in ", head.call.data());
  return what.empty() ? call : detail::join(call, " (", what, ")");
}

class C10dControl final : public ControlGroup {
 public:
  C10dControl(const std::string& group_name, Milliseconds timeout, const Members& members)
      : messages_(group_name, timeout, members), members_(members) {}

  int rank() const override { return messages_.rank(); }
  int size() const override { return messages_.size(); }

  void enter(const std::string& call) override { call_ = call; }
  std::string call() const override { return call_; }

  std::vector<std::string> exchange(const std::string& what, const std::string& mine) override {
    return swap(what, [&](int) -> const std::string& { return mine; });
  }
  std::vector<std::string> distribute(const std::string& what, const std::vector<std::string>& to_each) override {
    PS_CHECK(static_cast<int>(to_each.size()) == size(), ArgumentError, "values for ", to_each.size(), " ranks of ",
             size());
    return swap(what, [&](int r) -> const std::string& { return to_each[static_cast<size_t>(r)]; });
  }
  void abort() override { messages_.abort(); }
  void close() override { messages_.close(); }

 private:
  template <class Value>
  std::vector<std::string> swap(const std::string& what, const Value& value_for) {
    const auto num_ranks = static_cast<size_t>(size());
    std::vector<ExchangeHead> mine;
    for (int r = 0; r < size(); ++r) {
      mine.push_back({static_cast<int64_t>(value_for(r).size()), name_of(call_), name_of(what)});
    }
    std::vector<ExchangeHead> heads = mine;
    const auto head_bytes = static_cast<int64_t>(sizeof(ExchangeHead));
    const std::string label = what.empty() ? "exchange" : what;
    messages_.exchange(
        label.c_str(), [&](int r) { return std::pair(&mine[static_cast<size_t>(r)], head_bytes); },
        [&](int r) { return std::pair(&heads[static_cast<size_t>(r)], head_bytes); });
    check_same_point(heads);
    std::vector<std::string> values(num_ranks);
    for (size_t r = 0; r < num_ranks; ++r) values[r].resize(static_cast<size_t>(heads[r].num_bytes));
    values[static_cast<size_t>(rank())] = value_for(rank());
    messages_.exchange(
        label.c_str(),
        [&](int r) {
          const std::string& value = value_for(r);
          return std::pair(const_cast<char*>(value.data()), static_cast<int64_t>(value.size()));
        },
        [&](int r) {
          std::string& value = values[static_cast<size_t>(r)];
          return std::pair(value.data(), static_cast<int64_t>(value.size()));
        });
    return values;
  }

  // All ranks hold the same heads except for lengths, so all reach the same verdict.
  void check_same_point(const std::vector<ExchangeHead>& heads) const {
    const bool same = std::all_of(heads.begin(), heads.end(), [&](const ExchangeHead& other) {
      return other.call == heads[0].call && other.what == heads[0].what && other.num_bytes >= 0;
    });
    if (same) return;
    std::string who;
    for (size_t r = 0; r < heads.size(); ++r) {
      const int rank = members_.empty() ? static_cast<int>(r) : members_[r];
      who += detail::join(r == 0 ? "" : ", ", "rank ", rank, " is ", describe(heads[r]));
    }
    PS_CHECK(false, RankMismatch, "ranks are not at the same point: ", who,
             "; every rank must make the same calls in the same order, with as many batches as the others");
  }

  PeerMessages messages_;
  Members members_;
  std::string call_;
};

}  // namespace

std::unique_ptr<Communicator> make_c10d_communicator(const std::string& group_name, const Members& members) {
  return std::make_unique<C10dCommunicator>(group_name, members);
}

std::unique_ptr<ControlGroup> make_c10d_control(const std::string& group_name, double timeout_seconds,
                                                const Members& members) {
  PS_CHECK(timeout_seconds > 0, ArgumentError, "timeout_seconds is ", timeout_seconds, ", it must be above 0");
  const auto timeout = std::chrono::duration<double>(timeout_seconds);
  return std::make_unique<C10dControl>(group_name, std::chrono::ceil<Milliseconds>(timeout), members);
}

}  // namespace patrickstar
