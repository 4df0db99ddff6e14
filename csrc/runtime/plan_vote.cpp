#include "runtime/plan_vote.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "common/check.h"

namespace patrickstar {

namespace {

static_assert(std::is_trivially_copyable_v<Rates>, "rates travel as they are");

template <typename Value>
void append(std::string& message, const std::vector<Value>& values) {
  const uint64_t count = values.size();
  message.append(reinterpret_cast<const char*>(&count), sizeof(count));
  message.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Value));
}

// Reads what append() wrote, in the same order.
class Reader {
 public:
  explicit Reader(const std::string& message) : message_(message) {}

  template <typename Value>
  std::vector<Value> next() {
    uint64_t count = 0;
    read(&count, sizeof(count));
    PS_CHECK(count <= (message_.size() - at_) / sizeof(Value), StateError, "another rank's vote on the plan is of ",
             message_.size(), " bytes and ends early; run the same version of PatrickStar on all ranks");
    std::vector<Value> values(count);
    read(values.data(), count * sizeof(Value));
    return values;
  }

 private:
  void read(void* to, size_t num_bytes) {
    PS_CHECK(num_bytes <= message_.size() - at_, StateError, "another rank's vote on the plan is of ", message_.size(),
             " bytes and ends early; run the same version of PatrickStar on all ranks");
    if (num_bytes > 0) std::memcpy(to, message_.data() + at_, num_bytes);
    at_ += num_bytes;
  }

  const std::string& message_;
  size_t at_ = 0;
};

void keep_slower(Rates& all, const Rates& mine) {
  const auto least = [&](double Rates::* rate) { all.*rate = std::min(all.*rate, mine.*rate); };
  const auto most = [&](double Rates::* rate) { all.*rate = std::max(all.*rate, mine.*rate); };
  least(&Rates::upload_gbps);
  least(&Rates::download_gbps);
  least(&Rates::host_adam_params_per_second);
  least(&Rates::device_adam_params_per_second);
  least(&Rates::launch_ahead_seconds);
  most(&Rates::transfer_latency_seconds);
  most(&Rates::collective_latency_seconds);
  most(&Rates::synchronize_seconds);
  most(&Rates::gather_gbps);
  most(&Rates::scatter_gbps);
}

void keep_slower(StepTimes& all, const StepTimes& mine) {
  keep_slower(all.rates, mine.rates);
  std::vector<double>& seconds = all.shape.compute_seconds;
  for (size_t t = 0; t < seconds.size(); ++t) seconds[t] = std::max(seconds[t], mine.shape.compute_seconds[t]);
}

}  // namespace

std::string packed(const PlanVote& vote) {
  std::string message;
  append(message, std::vector<uint8_t>{vote.can_measure, vote.has_plan});
  append(message, vote.updates);
  append(message, vote.times ? std::vector<Rates>{vote.times->rates} : std::vector<Rates>{});
  append(message, vote.times ? vote.times->shape.compute_seconds : std::vector<double>{});
  return message;
}

PlanVote unpacked_vote(const std::string& message) {
  Reader reader(message);
  PlanVote vote;
  const auto flags = reader.next<uint8_t>();
  PS_CHECK(flags.size() == 2, StateError, "another rank's vote on the plan has ", flags.size(),
           " flags instead of 2; run the same version of PatrickStar on all ranks");
  vote.can_measure = flags[0] != 0;
  vote.has_plan = flags[1] != 0;
  vote.updates = reader.next<UpdateAt>();
  const auto rates = reader.next<Rates>();
  const auto compute_seconds = reader.next<double>();
  if (!rates.empty()) vote.times = StepTimes{rates.front(), {compute_seconds, {}, {}}};
  return vote;
}

PlanVote agreed(const std::vector<PlanVote>& votes) {
  PlanVote all = votes.front();
  for (const PlanVote& vote : votes) {
    all.can_measure = all.can_measure && vote.can_measure;
    all.has_plan = all.has_plan && vote.has_plan;
    for (size_t chunk = 0; chunk < all.updates.size(); ++chunk) {
      all.updates[chunk] = std::max(all.updates[chunk], vote.updates[chunk]);
    }
    const bool of_one_step =
        all.times && vote.times && all.times->shape.compute_seconds.size() == vote.times->shape.compute_seconds.size();
    if (of_one_step) {
      keep_slower(*all.times, *vote.times);
    } else {
      all.times.reset();
    }
  }
  return all;
}

}  // namespace patrickstar
