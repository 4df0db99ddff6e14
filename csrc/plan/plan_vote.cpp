#include "plan/plan_vote.h"

#include <algorithm>

#include "collective/message.h"

namespace patrickstar {

namespace {

// Takes each value of two steps or ranks by `of_rates` where more is faster, by `of_times` where less is.
template <typename OfRates, typename OfTimes>
void combine(Rates& all, const Rates& other, OfRates of_rates, OfTimes of_times) {
  of_rates(&Rates::upload_gbps);
  of_rates(&Rates::download_gbps);
  of_rates(&Rates::host_adam_params_per_second);
  of_rates(&Rates::device_adam_params_per_second);
  of_rates(&Rates::launch_ahead_seconds);
  of_rates(&Rates::device_memory_gbps);
  of_rates(&Rates::disk_read_gbps);
  of_rates(&Rates::disk_write_gbps);
  of_times(&Rates::transfer_latency_seconds);
  of_times(&Rates::collective_latency_seconds);
  of_times(&Rates::synchronize_seconds);
  for (double Rates::* rate : {&Rates::gather_gbps, &Rates::scatter_gbps}) all.*rate = std::max(all.*rate, other.*rate);
}

void keep_slower(Rates& all, const Rates& mine) {
  const auto least = [&](double Rates::* rate) { all.*rate = std::min(all.*rate, mine.*rate); };
  const auto most = [&](double Rates::* rate) { all.*rate = std::max(all.*rate, mine.*rate); };
  combine(all, mine, least, most);
  most(&Rates::param_pass);
  most(&Rates::states_pass);
}

void keep_faster(Rates& all, const Rates& other) {
  const auto least = [&](double Rates::* rate) { all.*rate = std::min(all.*rate, other.*rate); };
  const auto most = [&](double Rates::* rate) { all.*rate = std::max(all.*rate, other.*rate); };
  if (other.host_adam_params_per_second > all.host_adam_params_per_second) {  // passes are relative to it
    all.param_pass = other.param_pass;
    all.states_pass = other.states_pass;
  }
  combine(all, other, most, least);
}

void keep_more(std::vector<ActivationCopies>& all, const std::vector<ActivationCopies>& mine) {
  if (all.empty()) all = mine;
  for (size_t t = 0; t < mine.size(); ++t) {
    all[t].leaving_bytes = std::max(all[t].leaving_bytes, mine[t].leaving_bytes);
    all[t].coming_bytes = std::max(all[t].coming_bytes, mine[t].coming_bytes);
    all[t].needed_bytes = std::max(all[t].needed_bytes, mine[t].needed_bytes);
  }
}

void keep_slower(StepTimes& all, const StepTimes& mine) {
  keep_slower(all.rates, mine.rates);
  keep_more(all.shape.activations, mine.shape.activations);
  std::vector<double>& seconds = all.shape.compute_seconds;
  for (size_t t = 0; t < seconds.size(); ++t) seconds[t] = std::max(seconds[t], mine.shape.compute_seconds[t]);
  std::vector<Recipe>& updates = all.shape.updates;
  for (size_t chunk = 0; chunk < std::min(updates.size(), mine.shape.updates.size()); ++chunk) {
    updates[chunk] = std::max(updates[chunk], mine.shape.updates[chunk]);
  }
}

void check_recipes(const std::vector<Recipe>& updates, const MessageReader& reader) {
  for (Recipe recipe : updates) {
    reader.check(static_cast<size_t>(recipe) < kNumRecipes, "an update by no known recipe");
  }
}

}  // namespace

std::string packed(const StepTimes& times) {
  return MessageWriter()
      .add(times.rates)
      .add(times.shape.compute_seconds)
      .add(times.shape.updates)
      .add(times.shape.activations)
      .str();
}

StepTimes unpacked_times(const std::string& message, size_t num_chunks) {
  MessageReader reader(message, "times of a step");
  StepTimes times;
  times.rates = reader.next<Rates>();
  times.shape.compute_seconds = reader.next_list<double>();
  times.shape.updates = reader.next_list<Recipe>();
  times.shape.activations = reader.next_list<ActivationCopies>();
  reader.finish();
  check_recipes(times.shape.updates, reader);
  reader.check(times.shape.updates.empty() || times.shape.updates.size() == num_chunks, "updates of other chunks");
  reader.check(times.shape.activations.empty() || times.shape.activations.size() == times.shape.compute_seconds.size(),
               "activations of other accesses");
  return times;
}

StepTimes undisturbed(const StepTimes& earlier, StepTimes later) {
  const std::vector<double>& before = earlier.shape.compute_seconds;
  std::vector<double>& seconds = later.shape.compute_seconds;
  if (before.size() != seconds.size()) return later;
  keep_faster(later.rates, earlier.rates);
  for (size_t t = 0; t < seconds.size(); ++t) seconds[t] = std::min(seconds[t], before[t]);
  return later;
}

std::optional<StepTimes> slowest(const std::vector<StepTimes>& by_rank) {
  StepTimes all = by_rank.front();
  for (const StepTimes& times : by_rank) {
    if (times.shape.compute_seconds.size() != all.shape.compute_seconds.size()) return std::nullopt;
    keep_slower(all, times);
  }
  return all;
}

std::string packed(const PlanVote& vote) {
  return MessageWriter()
      .add(static_cast<uint8_t>(vote.can_measure))
      .add(static_cast<uint8_t>(vote.has_plan))
      .add(vote.updates)
      .add(static_cast<uint8_t>(vote.awaits_trace))
      .add(vote.timed_path)
      .add(vote.times ? packed(*vote.times) : std::string())
      .str();
}

PlanVote unpacked_vote(const std::string& message, size_t num_chunks) {
  MessageReader reader(message, "a vote on the plan");
  PlanVote vote;
  vote.can_measure = reader.next<uint8_t>() != 0;
  vote.has_plan = reader.next<uint8_t>() != 0;
  vote.updates = reader.next_list<Recipe>(num_chunks);
  vote.awaits_trace = reader.next<uint8_t>() != 0;
  vote.timed_path = reader.next<int64_t>();
  const std::string times = reader.next_text();
  reader.finish();
  check_recipes(vote.updates, reader);
  if (!times.empty()) vote.times = unpacked_times(times, num_chunks);
  return vote;
}

PlanVote agreed(const std::vector<PlanVote>& votes) {
  PlanVote all = votes.front();
  all.times.reset();
  bool one_path = true;
  for (const PlanVote& vote : votes) {
    all.can_measure = all.can_measure && vote.can_measure;
    all.has_plan = all.has_plan && vote.has_plan;
    all.awaits_trace = all.awaits_trace || vote.awaits_trace;
    for (size_t chunk = 0; chunk < all.updates.size(); ++chunk) {
      all.updates[chunk] = std::max(all.updates[chunk], vote.updates[chunk]);
    }
    if (!vote.times) continue;
    if (!all.times) {
      all.times = vote.times;
      all.timed_path = vote.timed_path;
      continue;
    }
    const bool same_step = vote.timed_path == all.timed_path &&
                           vote.times->shape.compute_seconds.size() == all.times->shape.compute_seconds.size();
    one_path = one_path && same_step;
    if (same_step) keep_slower(*all.times, *vote.times);
  }
  if (all.awaits_trace || !one_path) all.times.reset();
  return all;
}

}  // namespace patrickstar
