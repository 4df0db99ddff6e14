#include "transfer/transfer_engine.h"

#include <optional>
#include <utility>

#include "common/check.h"

namespace patrickstar {

namespace {

// What makes an array's value in host memory: gradients come down, all else is updated there.
StallCause maker_on_host(ArrayId id) {
  const bool gradient =
      id.kind == ArrayKind::kGrad || id.kind == ArrayKind::kGradShard || id.kind == ArrayKind::kGradSum;
  return gradient ? StallCause::kDownload : StallCause::kHostUpdate;
}

}  // namespace

void TransferEngine::upload(ArrayId id) {
  ArrayRecord& array = store_.array(id);
  PS_CHECK(array.on_host && array.slot, StateError, store_.describe(id), " has nothing to upload or no slot");
  array.device_ready = upload_to(id, array.slot.data, array.slot);
  array.slot.busy = {array.device_ready, nullptr};
  array.on_device = true;
}

Event TransferEngine::upload_to(ArrayId id, void* to, const Slot& slot) {
  ArrayRecord& array = store_.array(id);
  const int64_t num_bytes = store_.num_bytes(id);
  await_slot(Queue::kUpload, slot);
  {
    // Where it is an update's (backend.waits_on_host), this thread waits, and compute with it.
    const TraceScope stall(tracer_, {Track::kStall, maker_on_host(id), id});
    backend_.wait(Queue::kUpload, array.host_ready);
  }
  {
    const TraceScope span(tracer_, {Track::kUpload, StallCause::kNone, id, num_bytes});
    backend_.copy(Queue::kUpload, to, array.block.data, num_bytes);
  }
  array.block_busy_until = backend_.record(Queue::kUpload);
  counters_.uploaded_bytes += num_bytes;
  return array.block_busy_until;
}

void TransferEngine::download(ArrayId id) {
  ArrayRecord& array = store_.array(id);
  PS_CHECK(array.on_device && array.block, StateError, store_.describe(id), " has nothing to download or no block");
  const int64_t num_bytes = store_.num_bytes(id);
  backend_.wait(Queue::kDownload, array.device_ready);
  backend_.wait(Queue::kDownload, backend_.record(Queue::kCompute));
  {
    const TraceScope span(tracer_, {Track::kDownload, StallCause::kNone, id, num_bytes});
    backend_.copy(Queue::kDownload, array.block.data, array.slot.data, num_bytes);
  }
  array.host_ready = backend_.record(Queue::kDownload);
  array.slot.busy.copied = array.host_ready;
  array.on_host = true;
  counters_.downloaded_bytes += num_bytes;
}

void TransferEngine::await_on_device(ArrayId id) {
  ArrayRecord& array = store_.array(id);
  if (array.device_ready == nullptr) return;
  // An upload that has not begun waits for what makes the array on the host.
  const bool made = !tracer_.is_on() || backend_.is_over(array.host_ready);
  const bool gathered = id.kind == ArrayKind::kParam && store_.layout().is_sharded();
  const StallCause bringer = gathered ? StallCause::kCollective : StallCause::kUpload;
  const TraceScope stall(tracer_, {Track::kStall, made ? bringer : maker_on_host(id), id});
  backend_.wait(Queue::kCompute, array.device_ready);
  array.device_ready = nullptr;
}

void TransferEngine::await_on_host(ArrayId id) {
  ArrayRecord& array = store_.array(id);
  // A sum of gradients is read by its update, all else by uploads.
  const bool is_sum = id.kind == ArrayKind::kGradSum;
  await(array.host_ready, maker_on_host(id), id);
  await(array.block_busy_until, is_sum ? StallCause::kHostUpdate : StallCause::kUpload, id);
  array.host_ready = nullptr;
  array.block_busy_until = nullptr;
}

void TransferEngine::settle_block(ArrayId id) {
  ArrayRecord& array = store_.array(id);
  for (Event* event : {&array.host_ready, &array.block_busy_until}) {
    if (*event == nullptr) continue;
    const TraceScope stall(tracer_, {Track::kStall, maker_on_host(id), id});
    backend_.settle(std::exchange(*event, nullptr));
  }
}

void TransferEngine::await(const Event& event, StallCause cause, ArrayId id) {
  if (event == nullptr) return;
  const TraceScope stall(tracer_, {Track::kStall, cause, id});
  backend_.synchronize(event);
}

void TransferEngine::mark_busy(ArrayId id) { store_.array(id).slot.busy.computed = backend_.record(Queue::kCompute); }

void TransferEngine::await_slot(Queue queue, const Slot& slot) {
  std::optional<TraceScope> stall;
  if (queue == Queue::kCompute) stall.emplace(tracer_, SpanLabel{Track::kStall, StallCause::kRoom});
  backend_.wait(queue, slot.busy.copied);
  backend_.wait(queue, slot.busy.computed);
}

}  // namespace patrickstar
