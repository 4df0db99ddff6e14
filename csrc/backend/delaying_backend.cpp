#include "backend/delaying_backend.h"

#include <chrono>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

namespace patrickstar {

namespace {

class DelayingBackend final : public Backend {
 public:
  DelayingBackend(std::unique_ptr<Backend> backend, const DelayOptions& options)
      : inner_(std::move(backend)), options_(options), generator_(options.seed) {}

  // Delayed calls.

  void copy(Queue queue, void* to, const void* from, int64_t num_bytes) override {
    const bool crosses_link = queue == Queue::kUpload || queue == Queue::kDownload || queue == Queue::kRoundTripUp ||
                              queue == Queue::kRoundTripDown;
    if (crosses_link) inner_->delay(queue, transfer_seconds(num_bytes));
    inner_->copy(queue, to, from, num_bytes);
  }
  void follow_compute() override {
    inner_->follow_compute();
    inner_->delay(Queue::kCompute, random_seconds());
  }
  void synchronize(const Event& event) override {
    inner_->synchronize(event);
    if (const double seconds = random_seconds(); seconds > 0) {
      std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    }
  }

  // Forwarded calls.

  void* allocate(int64_t num_bytes) override { return inner_->allocate(num_bytes); }
  void* allocate_over_limit(int64_t num_bytes) override { return inner_->allocate_over_limit(num_bytes); }
  void free(void* pointer, int64_t num_bytes, const BusyUntil& busy) noexcept override {
    inner_->free(pointer, num_bytes, busy);
  }
  void* allocate_for_activations(int64_t num_bytes, BusyUntil& busy) override {
    return inner_->allocate_for_activations(num_bytes, busy);
  }
  void free_for_activations(void* pointer, int64_t num_bytes, const BusyUntil& busy) noexcept override {
    inner_->free_for_activations(pointer, num_bytes, busy);
  }
  int64_t lent_activation_bytes() override { return inner_->lent_activation_bytes(); }
  bool is_idle(const BusyUntil& busy) override { return inner_->is_idle(busy); }
  const char* name() const override { return inner_->name(); }
  void shut_down() override { inner_->shut_down(); }
  void fill_zero(Queue queue, void* data, int64_t num_bytes) override { inner_->fill_zero(queue, data, num_bytes); }
  void enqueue(Queue queue, std::function<void()> task) override { inner_->enqueue(queue, std::move(task)); }
  void delay(Queue queue, double seconds) override { inner_->delay(queue, seconds); }
  Event record(Queue queue) override { return inner_->record(queue); }
  void wait(Queue queue, const Event& event) override { inner_->wait(queue, event); }
  void settle(const Event& event) noexcept override { inner_->settle(event); }
  bool is_over(const Event& event) override { return inner_->is_over(event); }
  void drain(Queue queue) noexcept override { inner_->drain(queue); }
  bool waits_on_host(const Event& event) override { return inner_->waits_on_host(event); }
  Mark mark(Queue queue) override { return inner_->mark(queue); }
  double seconds_between(const Mark& begin, const Mark& end) override { return inner_->seconds_between(begin, end); }
  void pin(void* data, int64_t num_bytes) override { inner_->pin(data, num_bytes); }
  std::function<void(void*, int64_t)> unpinner() const override { return inner_->unpinner(); }
  bool measures_activation_memory_freely() const override { return inner_->measures_activation_memory_freely(); }
  bool follows_activations() const override { return inner_->follows_activations(); }
  int64_t activation_bytes() override { return inner_->activation_bytes(); }
  int64_t take_activation_peak() override { return inner_->take_activation_peak(); }
  int64_t take_live_activation_peak() override { return inner_->take_live_activation_peak(); }
  int64_t peak_bytes() override { return inner_->peak_bytes(); }
  void reset_peak() override { inner_->reset_peak(); }
  int64_t least_limit_bytes() override { return inner_->least_limit_bytes(); }
  void reset_least_limit() override { inner_->reset_least_limit(); }
  void note_needed_chunk_buffers(int64_t num_bytes) override { inner_->note_needed_chunk_buffers(num_bytes); }
  void reclaim() override { inner_->reclaim(); }
  int64_t reclaimable_bytes() const override { return inner_->reclaimable_bytes(); }
  int64_t limit_bytes() const override { return inner_->limit_bytes(); }
  bool may_exceed_limit() const override { return inner_->may_exceed_limit(); }
  void set_limit_policy(LimitPolicy policy) override { inner_->set_limit_policy(policy); }
  void set_pressure_handler(PressureHandler* handler) override { inner_->set_pressure_handler(handler); }

 private:
  double transfer_seconds(int64_t num_bytes) {
    const double link = options_.bytes_per_second > 0 ? static_cast<double>(num_bytes) / options_.bytes_per_second : 0;
    return options_.latency_seconds + link + random_seconds();
  }
  double random_seconds() {
    if (options_.max_random_seconds <= 0) return 0;
    const std::lock_guard<std::mutex> lock(mutex_);  // synchronize() may be called by any thread
    return std::uniform_real_distribution<double>(0, options_.max_random_seconds)(generator_);
  }

  const std::unique_ptr<Backend> inner_;
  const DelayOptions options_;
  std::mutex mutex_;
  std::mt19937_64 generator_;
};

}  // namespace

std::unique_ptr<Backend> make_delaying_backend(std::unique_ptr<Backend> backend, const DelayOptions& options) {
  if (!options.is_any()) return backend;
  return std::make_unique<DelayingBackend>(std::move(backend), options);
}

}  // namespace patrickstar
