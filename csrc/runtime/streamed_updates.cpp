#include "runtime/streamed_updates.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "chunk/layout.h"

namespace patrickstar {

namespace {

constexpr double kParamsPerSecond = 3e9;  // until it is measured: 14 bytes each way over PCIe 5
constexpr int64_t kStateBytes = 4;

using optim::AdamJob;
using optim::AdamRange;

template <typename Pointer>
Pointer advance(Pointer data, int64_t num_bytes) {
  return reinterpret_cast<Pointer>(reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(num_bytes));
}

template <typename Pointer>
int64_t distance(Pointer from, Pointer to) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(to)) -
         static_cast<int64_t>(reinterpret_cast<uintptr_t>(from));
}

// The part of `range` from element `begin` on.
AdamRange part(const AdamRange& range, int64_t begin, int64_t numel) {
  AdamRange result = range;
  result.numel = numel;
  for (float** state : {&result.master, &result.momentum, &result.variance}) *state += begin;
  for (float** state : {&result.new_master, &result.new_momentum, &result.new_variance}) {
    if (*state != nullptr) *state += begin;
  }
  result.grad = advance(range.grad, begin * element_size(range.grad_dtype));
  result.param = advance(range.param, begin * element_size(range.param_dtype));
  return result;
}

// Elements from the beginning of `a` to that of `b`, if they lie so in all arrays; else -1.
int64_t offset_in_block(const AdamRange& a, const AdamRange& b) {
  const int64_t offset = distance(a.master, b.master) / kStateBytes;
  if (offset < 0 || a.grad_dtype != b.grad_dtype || a.param_dtype != b.param_dtype) return -1;
  const AdamRange there = part(a, offset, b.numel);
  const bool same = there.master == b.master && there.momentum == b.momentum && there.variance == b.variance &&
                    there.grad == b.grad && there.param == b.param && there.new_master == b.new_master &&
                    there.new_momentum == b.new_momentum && there.new_variance == b.new_variance;
  return same ? offset : -1;
}

bool shares_place(const AdamRange& range) { return element_size(range.grad_dtype) == element_size(range.param_dtype); }

// Where a window of `numel` elements lies in a buffer.
AdamRange in_buffer(const AdamRange& span, char* data) {
  AdamRange range = span;
  const int64_t state_bytes = span.numel * kStateBytes;
  for (float** state : {&range.master, &range.momentum, &range.variance}) {
    *state = reinterpret_cast<float*>(data);
    data += state_bytes;
  }
  range.new_master = range.new_momentum = range.new_variance = nullptr;
  range.grad = data;
  range.param = shares_place(span) ? data : data + span.numel * element_size(span.grad_dtype);
  return range;
}

}  // namespace

int64_t window_capacity(int64_t num_bytes, DType grad_dtype, DType param_dtype) {
  const int64_t grad_bytes = element_size(grad_dtype);
  const int64_t param_bytes = element_size(param_dtype);
  const int64_t bytes = 3 * kStateBytes + grad_bytes + (grad_bytes == param_bytes ? 0 : param_bytes);
  return num_bytes / bytes / kAlignment * kAlignment;
}

std::vector<UpdateWindow> split_into_windows(const std::vector<AdamJob>& jobs, int64_t buffer_bytes) {
  std::vector<UpdateWindow> windows;
  for (const AdamJob& job : jobs) {
    const int64_t capacity = window_capacity(buffer_bytes, job.range.grad_dtype, job.range.param_dtype);
    for (int64_t begin = 0; begin < job.range.numel;) {
      AdamRange rest = part(job.range, begin, job.range.numel - begin);
      const int64_t offset = windows.empty() ? -1 : offset_in_block(windows.back().span, rest);
      const bool joins =
          offset >= 0 && offset - windows.back().span.numel < kAlignment && offset + kAlignment <= capacity;
      if (!joins) windows.push_back({part(rest, 0, 0), {}});
      UpdateWindow& window = windows.back();
      const int64_t start = joins ? offset : 0;
      rest.numel = std::min(rest.numel, capacity - start);
      window.jobs.push_back({rest, job.scalars});
      window.span.numel = start + rest.numel;
      begin += rest.numel;
    }
  }
  return windows;
}

StreamedUpdates::StreamedUpdates(Backend& backend, optim::Compute& host_compute, optim::Compute& device_compute,
                                 SlotPool& slots, Tracer& tracer, QueueDelays& delays)
    : backend_(backend),
      host_compute_(host_compute),
      device_compute_(device_compute),
      slots_(slots),
      tracer_(tracer),
      delays_(delays),
      rate_(kParamsPerSecond) {}

StreamedUpdates::~StreamedUpdates() { close(); }

bool StreamedUpdates::open(int64_t buffer_bytes) {
  if (is_open()) return true;
  for (Buffer& buffer : buffers_) {
    buffer.slot = slots_.acquire(buffer_bytes);
    if (!buffer.slot) {
      close();
      return false;
    }
    backend_.wait(Queue::kStateUpload, buffer.slot.busy.copied);
    backend_.wait(Queue::kStateUpload, buffer.slot.busy.computed);
  }
  backend_.wait(Queue::kStateUpload, backend_.record(Queue::kCompute));
  return true;
}

void StreamedUpdates::close() {
  backend_.synchronize(queue_.record());
  backend_.synchronize(finisher_.record());
  for (Buffer& buffer : buffers_) {
    buffer.done = nullptr;
    if (!buffer.slot) continue;
    buffer.slot.busy = {};
    slots_.release(std::exchange(buffer.slot, {}));
  }
}

Event StreamedUpdates::submit(HostUpdate update) {
  rate_.submitted(update.numel());
  auto running = std::make_shared<Running>();
  running->span =
      tracer_.open_host_span(update_label(Track::kStreamedAdam, update.chunk, update.jobs), update.cancelled);
  running->done = std::make_shared<HostEvent>();
  running->update = std::move(update);
  queue_.submit([this, running] {
    run(*running);
    finisher_.submit(
        [this, running, last_piece = backend_.record(Queue::kStateDownload)] { finish(*running, last_piece); });
  });
  return running->done;
}

void StreamedUpdates::run(Running& running) {
  const HostUpdate& update = running.update;
  if (update.is_cancelled()) return;
  for (const Event& event : update.after) backend_.synchronize(event);
  running.begin = TraceClock::now();
  restore_and_carry(update, host_compute_);
  const int64_t buffer_bytes = buffers_.front().slot.num_bytes;
  for (const UpdateWindow& window : split_into_windows(update.jobs, buffer_bytes)) {
    if (update.is_cancelled()) return;
    Buffer& buffer = buffers_[next_buffer_++ % buffers_.size()];
    backend_.synchronize(buffer.done);
    pass(window, buffer);
  }
}

void StreamedUpdates::pass(const UpdateWindow& window, Buffer& buffer) {
  const AdamRange& host = window.span;
  const AdamRange device = in_buffer(host, static_cast<char*>(buffer.slot.data));
  const int64_t state_bytes = host.numel * kStateBytes;
  const int64_t grad_bytes = host.numel * element_size(host.grad_dtype);
  const int64_t param_bytes = host.numel * element_size(host.param_dtype);

  backend_.delay(Queue::kStateUpload, delays_.transfer_seconds(3 * state_bytes + grad_bytes));
  backend_.copy(Queue::kStateUpload, device.master, host.master, state_bytes);
  backend_.copy(Queue::kStateUpload, device.momentum, host.momentum, state_bytes);
  backend_.copy(Queue::kStateUpload, device.variance, host.variance, state_bytes);
  backend_.copy(Queue::kStateUpload, const_cast<void*>(device.grad), host.grad, grad_bytes);

  std::vector<AdamJob> jobs = window.jobs;
  for (AdamJob& job : jobs) job.range = part(device, offset_in_block(host, job.range), job.range.numel);
  backend_.wait(Queue::kStateUpdate, backend_.record(Queue::kStateUpload));
  backend_.enqueue(Queue::kStateUpdate, [this, jobs = std::move(jobs)] { device_compute_.adam(jobs); });

  backend_.wait(Queue::kStateDownload, backend_.record(Queue::kStateUpdate));
  backend_.delay(Queue::kStateDownload, delays_.transfer_seconds(3 * state_bytes + param_bytes));
  const bool apart = host.new_master != nullptr;
  backend_.copy(Queue::kStateDownload, host.param, device.param, param_bytes);
  backend_.copy(Queue::kStateDownload, apart ? host.new_master : host.master, device.master, state_bytes);
  backend_.copy(Queue::kStateDownload, apart ? host.new_momentum : host.momentum, device.momentum, state_bytes);
  backend_.copy(Queue::kStateDownload, apart ? host.new_variance : host.variance, device.variance, state_bytes);
  buffer.done = backend_.record(Queue::kStateDownload);
}

void StreamedUpdates::finish(Running& running, const Event& last_piece) {
  backend_.synchronize(last_piece);
  const bool ran = running.begin != TraceClock::time_point{};
  double seconds = 0;
  if (ran) {
    // It shared the queues with the one before until that was over.
    const TraceClock::time_point begin = std::max(running.begin, last_finished_);
    last_finished_ = TraceClock::now();
    seconds = std::chrono::duration<double>(last_finished_ - begin).count();
    if (running.span) {
      running.span->begin = begin;
      running.span->end = last_finished_;
      running.span->ran = true;
    }
  }
  rate_.finished(running.update.numel(), seconds);
  if (running.span) running.span->done.complete();
  running.done->complete();
}

}  // namespace patrickstar
