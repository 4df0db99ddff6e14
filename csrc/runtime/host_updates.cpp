#include "runtime/host_updates.h"

#include <chrono>
#include <memory>
#include <thread>
#include <utility>

namespace patrickstar {

namespace {

constexpr double kParamsPerSecondAndThread = 0.3e9;  // until it is measured

}  // namespace

HostUpdates::HostUpdates(Backend& backend, optim::Compute& compute, Tracer& tracer, QueueDelays& delays,
                         int num_threads)
    : backend_(backend),
      compute_(compute),
      tracer_(tracer),
      delays_(delays),
      rate_(kParamsPerSecondAndThread * num_threads),
      alone_(rate_.params_per_second()),
      beside_(rate_.params_per_second()) {}

Event HostUpdates::submit(HostUpdate update) {
  rate_.submitted(update.numel());
  const std::shared_ptr<HostSpan> span =
      tracer_.open_host_span(update_label(Track::kHostAdam, update.chunk, update.jobs), update.cancelled);
  queue_.submit([this, span, shared = std::make_shared<const HostUpdate>(std::move(update))] {
    run(*shared, span.get());
    if (span) span->done.complete();
  });
  return queue_.record();
}

void HostUpdates::run(const HostUpdate& update, HostSpan* span) {
  if (update.is_cancelled()) return rate_.finished(update.numel(), 0);
  for (const Event& event : update.after) backend_.synchronize(event);
  if (const double seconds = delays_.random_seconds(); seconds > 0) {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  }
  const TraceClock::time_point begin = TraceClock::now();
  {
    const HostSpanScope scope(span);
    restore_and_carry(update, compute_);
    compute_.adam(update.jobs);
  }
  const double seconds = std::chrono::duration<double>(TraceClock::now() - begin).count();
  rate_.finished(update.numel(), seconds);
  UpdateRate& rate = neighbour_ != nullptr && neighbour_->is_busy() ? beside_ : alone_;
  rate.submitted(update.numel());
  rate.finished(update.numel(), seconds);
}

}  // namespace patrickstar
