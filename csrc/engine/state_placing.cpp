#include "engine/state_placing.h"

#include <optional>
#include <string>
#include <vector>

namespace patrickstar {

namespace {

void fill_headroom(OpenEngine& open, const Timeline& step) {
  if (open.updates.num_committed() > 0) return;  // updates are under way; states stay on the host
  open.updates.cancel_all();
  open.residency.fill_headroom(step);
  open.updates.forget_choice();
}

// Call when a step's activation memory is known. Cancels the updates that began in its backward, since they read states
// that move.
void place_states(OpenEngine& open, const Timeline& step) {
  if (open.placing == StatesPlacing::kOfUnfrozen) {
    open.placing = StatesPlacing::kDone;
    return fill_headroom(open, step);
  }
  open.updates.cancel_all();
  open.residency.place_in_headroom(step);
}

// All ranks expect the most activation memory and the slowest rank's times; no times if their accesses differ.
void agree_on_expected(OpenEngine& open) {
  ExpectedStep& expected = *open.expected;
  const std::string mine = expected.times ? packed(*expected.times) : std::string();
  const StepAgreement agreement = open.collectives->agree_on(expected.timeline, nullptr, mine);
  expected.times.reset();
  if (agreement.ways != StepAgreement::Ways::kAlike) return;
  std::vector<StepTimes> by_rank;
  for (const std::string& times : agreement.notes) {
    if (times.empty()) return;
    by_rank.push_back(unpacked_times(times, static_cast<size_t>(open.layout().num_chunks())));
  }
  expected.times = slowest(by_rank);
}

}  // namespace

void place_before_updates(OpenEngine& open) {
  const bool is_time_to_return = open.residency.is_time_to_return();
  if (open.recorder.position() < 0 && !open.layout().has_other_ranks()) return;
  if (open.expected) agree_on_expected(open);
  if (open.placing != StatesPlacing::kDone) {
    Timeline timeline = open.expected ? open.expected->timeline : open.recorder.running();
    if (!open.expected) open.collectives->agree_on(timeline, nullptr);
    place_states(open, timeline);
  } else if (open.expected) {
    fill_headroom(open, open.expected->timeline);
  } else if (open.residency.is_settling()) {
    Timeline timeline = open.recorder.running();
    open.collectives->agree_on(timeline, nullptr);
    if (open.residency.has_room_for_more(timeline)) fill_headroom(open, timeline);
  } else if (is_time_to_return) {
    fill_headroom(open, open.recorder.running());
  }
}

}  // namespace patrickstar
