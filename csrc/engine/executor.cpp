#include "engine/executor.h"

#include <utility>

namespace patrickstar {

void Executor::bring(ArrayId id, ArrayId part, const Emitted& arrival, DeviceBuffer staging) {
  ArrayRecord& array = memory_.array(id);
  Coming coming{id, part, static_cast<char*>(array.device_buffer.data), nullptr, std::move(staging)};
  if (part != id) coming.place += memory_.layout().chunk(id.chunk).sharding.rank * memory_.layout().num_bytes(part);
  for (const Instruction& instruction : arrival) {
    switch (instruction.op) {
      case Op::kFetch:
        fetch(coming);
        break;
      case Op::kCast:
        cast(coming);
        break;
      case Op::kDequantize:
        dequantize(coming);
        break;
      case Op::kGather:
        gather(coming);
        break;
      default:  // the buffer exists already
        break;
    }
  }
  array.device_ready = coming.ready;
}

void Executor::fetch(Coming& coming) {
  ArrayRecord& array = memory_.array(coming.id);
  if (!coming.staging) {
    if (coming.id != coming.part) {
      coming.ready = memory_.upload_to(coming.part, coming.place, array.device_buffer);
    } else {
      memory_.upload(coming.id);
      coming.ready = array.device_ready;
    }
    return;
  }
  Backend& backend = memory_.backend();
  memory_.upload_to({coming.id.chunk, ArrayKind::kQuantized}, coming.staging.data, coming.staging);
  memory_.await_device_buffer(Queue::kUpload, array.device_buffer);
  memory_.dequantize(Queue::kUpload, coming.id.chunk, coming.staging.data, coming.place);
  coming.ready = backend.record(Queue::kUpload);
  coming.staging.busy = {coming.ready, nullptr};
  array.device_buffer.busy = {coming.ready, nullptr};
  array.set_on_device();
}

void Executor::cast(Coming& coming) {
  ArrayRecord& array = memory_.array(coming.id);
  memory_.await_device_buffer(Queue::kCompute, array.device_buffer);
  if (memory_.array(coming.part).on_device) {
    memory_.copy_on_device(coming.part, coming.place);
  } else {
    memory_.cast_on_device(coming.id.chunk, coming.place);
  }
  if (coming.id != coming.part) {
    coming.ready = memory_.backend().record(Queue::kCompute);
    return;
  }
  if (coming.id.kind == ArrayKind::kParam) memory_.present(Queue::kCompute, coming.id.chunk);
  array.set_on_device();
}

void Executor::dequantize(Coming& coming) {
  ArrayRecord& array = memory_.array(coming.id);
  const ArrayId codes{coming.id.chunk, ArrayKind::kQuantized};
  memory_.await_device_buffer(Queue::kCompute, array.device_buffer);
  memory_.await_on_device(codes);
  memory_.dequantize(Queue::kCompute, coming.id.chunk, memory_.array(codes).device_buffer.data, coming.place);
  coming.ready = memory_.backend().record(Queue::kCompute);
  array.set_on_device();
}

// All-gather in place: this rank's part is in the array's device buffer.
void Executor::gather(Coming& coming) {
  ArrayRecord& array = memory_.array(coming.id);
  Backend& backend = memory_.backend();
  const int64_t part_bytes = memory_.layout().num_bytes(coming.part);
  const int64_t others_bytes = memory_.layout().num_bytes(coming.id) - part_bytes;
  backend.wait(Queue::kGather, coming.ready);
  {
    const TraceScope span(memory_.tracer(), {Track::kGather, StallCause::kNone, coming.id, others_bytes});
    const Sharding& sharding = memory_.layout().chunk(coming.id.chunk).sharding;
    backend.enqueue(Queue::kGather, [&group = collectives_.gather_group(sharding), whole = array.device_buffer.data,
                                     part_bytes] { group.all_gather(whole, part_bytes); });
  }
  memory_.counters().gathered_bytes += others_bytes;
  memory_.present(Queue::kGather, coming.id.chunk);
  coming.ready = backend.record(Queue::kGather);
  array.device_buffer.busy = {coming.ready, nullptr};
  array.set_on_device();
}

}  // namespace patrickstar
