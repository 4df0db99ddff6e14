#include "plan/plan_vote.h"

#include <algorithm>

#include "collective/message.h"

namespace patrickstar {

namespace {

void keep_slower(Rates& all, const Rates& mine) {
  const auto least = [&](double Rates::* rate) { all.*rate = std::min(all.*rate, mine.*rate); };
  const auto most = [&](double Rates::* rate) { all.*rate = std::max(all.*rate, mine.*rate); };
  least(&Rates::upload_gbps);
  least(&Rates::download_gbps);
  least(&Rates::host_adam_params_per_second);
  least(&Rates::device_adam_params_per_second);
  least(&Rates::launch_ahead_seconds);
  least(&Rates::device_memory_gbps);
  least(&Rates::disk_read_gbps);
  least(&Rates::disk_write_gbps);
  most(&Rates::transfer_latency_seconds);
  most(&Rates::collective_latency_seconds);
  most(&Rates::synchronize_seconds);
  most(&Rates::param_pass);
  most(&Rates::states_pass);
  most(&Rates::gather_gbps);
  most(&Rates::scatter_gbps);
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
}

}  // namespace

std::string packed(const PlanVote& vote) {
  return MessageWriter()
      .add(static_cast<uint8_t>(vote.can_measure))
      .add(static_cast<uint8_t>(vote.has_plan))
      .add(vote.updates)
      .add(static_cast<uint8_t>(vote.awaits_trace))
      .add(vote.timed_path)
      .add(vote.times ? std::vector<Rates>{vote.times->rates} : std::vector<Rates>{})
      .add(vote.times ? vote.times->shape.compute_seconds : std::vector<double>{})
      .add(vote.times ? vote.times->shape.activations : std::vector<ActivationCopies>{})
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
  const auto rates = reader.next_list<Rates>();
  const auto compute_seconds = reader.next_list<double>();
  const auto activations = reader.next_list<ActivationCopies>();
  reader.finish();
  reader.check(rates.size() <= 1, "several rates");
  for (Recipe recipe : vote.updates) {
    reader.check(static_cast<size_t>(recipe) < kNumRecipes, "an update by no known recipe");
  }
  reader.check(activations.empty() || activations.size() == compute_seconds.size(), "activations of other accesses");
  if (rates.empty()) return vote;
  vote.times = StepTimes{rates.front(), {compute_seconds, {}, {}}};
  vote.times->shape.activations = activations;
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
