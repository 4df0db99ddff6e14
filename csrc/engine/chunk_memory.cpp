#include "engine/chunk_memory.h"

#include <cstring>
#include <optional>
#include <utility>

#include "common/check.h"

namespace patrickstar {

namespace {

// Share by which a reused device buffer may exceed the request, on CUDA: PyTorch's allocator rounds requests up and
// caches freed memory anyway. Not measured.
constexpr double kDeviceBufferWaste = 0.125;

// Producer of an array's value in host memory: downloads for gradients, host updates for all else.
StallCause maker_on_host(ArrayId id) {
  const bool gradient =
      id.kind == ArrayKind::kGrad || id.kind == ArrayKind::kGradShard || id.kind == ArrayKind::kGradSum;
  return gradient ? StallCause::kDownload : StallCause::kHostUpdate;
}

}  // namespace

ChunkMemory::ChunkMemory(SharedDevice& device, Layout layout, std::vector<std::string> param_names,
                         std::shared_ptr<const optim::ComputeFormat> format,
                         const std::vector<std::vector<int64_t>>& shapes)
    : device_(device),
      device_buffers_(device.backend(), device.backend().follows_activations() ? 0.0 : kDeviceBufferWaste),
      activation_memory_(device.backend()),
      arena_(device.make_arena()),
      store_(std::move(layout), std::move(param_names)),
      tracer_(device.backend(), store_, device_buffers_),
      format_(std::move(format)),
      shapes_(shapes) {
  if (!has_format()) return;
  PS_CHECK(static_cast<int>(shapes.size()) == this->layout().num_params(), ArgumentError,
           "a compute format was given with ", shapes.size(), " shapes for ", this->layout().num_params(),
           " parameters; give one for each");
  for (const ChunkSpec& chunk : this->layout().chunks()) {
    PS_CHECK(!chunk.trainable || !chunk.keeps_param(), ArgumentError, store_.param_name(chunk.params.front()),
             " computes in a format of its own, but has no float32 master apart from its compute value, which the "
             "format would round for good; leave optimizer.master as it is by default, and set optimizer.speculation "
             "to \"never\"");
  }
}

void ChunkMemory::upload(ArrayId id) {
  ArrayRecord& record = array(id);
  PS_CHECK(record.on_host && record.device_buffer, StateError, store_.describe(id),
           " has nothing to upload or no device buffer");
  record.device_ready = upload_to(id, record.device_buffer.data, record.device_buffer);
  // Gathered values were formatted on the device.
  const bool is_formatted = id.kind == ArrayKind::kParam && !is_whole(id) && present(Queue::kUpload, id.chunk);
  if (is_formatted) record.device_ready = backend().record(Queue::kUpload);
  record.device_buffer.busy = {record.device_ready, nullptr};
  record.on_device = true;
}

Event ChunkMemory::upload_to(ArrayId id, void* to, const DeviceBuffer& device_buffer) {
  await_device_buffer(Queue::kUpload, device_buffer);
  return upload_pieces(id, {{to, 0, store_.num_bytes(id)}});
}

Event ChunkMemory::upload_pieces(ArrayId id, const std::vector<Piece>& pieces) {
  ArrayRecord& record = array(id);
  int64_t num_bytes = 0;
  for (const Piece& piece : pieces) num_bytes += piece.num_bytes;
  QueueGuard uploads(backend(), Queue::kUpload);
  {
    // If a host update still makes the array (backend.waits_on_host), this thread waits, and so does compute.
    const TraceScope stall(tracer_, {Track::kStall, maker_on_host(id), id});
    backend().wait(Queue::kUpload, record.host_ready);
    // The states' write to disk (DiskStates) precedes this upload, whose event replaces the write's event.
    if (record.on_disk) backend().wait(Queue::kUpload, record.host_buffer_busy_until);
  }
  {
    const TraceScope span(tracer_, {Track::kUpload, StallCause::kNone, id, num_bytes});
    for (const Piece& piece : pieces) {
      const char* from = static_cast<const char*>(record.block.data) + piece.offset;
      backend().copy(Queue::kUpload, piece.to, from, piece.num_bytes);
    }
  }
  record.host_buffer_busy_until = uploads.record();
  counters_.uploaded_bytes += num_bytes;
  return record.host_buffer_busy_until;
}

void ChunkMemory::download(ArrayId id) {
  ArrayRecord& record = array(id);
  PS_CHECK(record.on_device && record.block, StateError, store_.describe(id), " has nothing to download or no block");
  const int64_t num_bytes = store_.num_bytes(id);
  QueueGuard downloads(backend(), Queue::kDownload);
  backend().wait(Queue::kDownload, record.device_ready);
  backend().wait(Queue::kDownload, backend().record(Queue::kCompute));
  // The host buffer may still be read: by the last update of states if it belongs to the gradient alone, or by another
  // chunk's transfers if it is lent (DiskStates).
  for (const Event& event : {record.host_buffer_busy_until, record.host_ready}) {
    if (event == nullptr) continue;
    const TraceScope stall(tracer_, {Track::kStall, StallCause::kHostUpdate, id});
    backend().wait(Queue::kDownload, event);
  }
  {
    const TraceScope span(tracer_, {Track::kDownload, StallCause::kNone, id, num_bytes});
    backend().copy(Queue::kDownload, record.block.data, record.device_buffer.data, num_bytes);
  }
  record.host_ready = downloads.record();
  record.host_buffer_busy_until = nullptr;
  record.device_buffer.busy.copied = record.host_ready;
  record.on_host = true;
  counters_.downloaded_bytes += num_bytes;
}

void ChunkMemory::await_on_device(ArrayId id) {
  ArrayRecord& record = array(id);
  if (record.device_ready == nullptr) return;
  // An upload that has not begun waits for the producer on the host.
  const bool made = !tracer_.is_on() || backend().is_over(record.host_ready);
  const StallCause bringer = is_whole(id) ? StallCause::kCollective : StallCause::kUpload;
  const TraceScope stall(tracer_, {Track::kStall, made ? bringer : maker_on_host(id), id});
  backend().wait(Queue::kCompute, record.device_ready);
  record.device_ready = nullptr;
}

void ChunkMemory::await_on_host(ArrayId id) {
  ArrayRecord& record = array(id);
  // An accumulated gradient sum is read by its update, all else by uploads.
  const bool is_sum = id.kind == ArrayKind::kGradSum;
  await(record.host_ready, maker_on_host(id), id);
  await(record.host_buffer_busy_until, is_sum ? StallCause::kHostUpdate : StallCause::kUpload, id);
  record.host_ready = nullptr;
  record.host_buffer_busy_until = nullptr;
}

void ChunkMemory::settle_block(ArrayId id) {
  ArrayRecord& record = array(id);
  for (Event* event : {&record.host_ready, &record.host_buffer_busy_until}) {
    if (*event == nullptr) continue;
    const TraceScope stall(tracer_, {Track::kStall, maker_on_host(id), id});
    backend().settle(std::exchange(*event, nullptr));
  }
}

void ChunkMemory::await(const Event& event, StallCause cause, ArrayId id) {
  if (event == nullptr) return;
  const TraceScope stall(tracer_, {Track::kStall, cause, id});
  backend().synchronize(event);
}

void ChunkMemory::await_device_buffer(Queue queue, const DeviceBuffer& device_buffer) {
  std::optional<TraceScope> stall;
  if (queue == Queue::kCompute) stall.emplace(tracer_, SpanLabel{Track::kStall, StallCause::kRoom});
  backend().wait(queue, device_buffer.busy.copied);
  backend().wait(queue, device_buffer.busy.computed);
}

void ChunkMemory::leave_device(ArrayId id) {
  ArrayRecord& record = array(id);
  if (!record.device_buffer) return;
  if (id.kind == ArrayKind::kParam && store_.storage(id.chunk)) store_.storage(id.chunk).detach();
  record.device_buffer.busy.computed = backend().record(Queue::kCompute);
  record.device_buffer.reset();
  record.device_ready = nullptr;
  record.on_device = false;
  record.prefetched = false;
  tracer_.sample_memory();
}

void ChunkMemory::drop_host_buffer(ArrayId id) {
  ArrayRecord& record = array(id);
  if (!record.block) return;
  settle_block(id);
  record.block.reset();
  record.on_host = false;
}

void ChunkMemory::drop_device_buffer(ArrayId id) {
  leave_device(id);
  if (is_whole(id)) drop_host_buffer(id);
}

void ChunkMemory::discard(ArrayId id) {
  leave_device(id);
  drop_host_buffer(id);
}

void ChunkMemory::attach(ChunkId chunk) {
  if (store_.storage(chunk)) store_.storage(chunk).attach(array({chunk, ArrayKind::kParam}).device_buffer.data);
}

void ChunkMemory::copy_on_device(ArrayId id, void* to) {
  await_on_device(id);
  backend().copy(Queue::kCompute, to, array(id).device_buffer.data, store_.num_bytes(id));
}

void ChunkMemory::cast_on_device(ChunkId chunk, void* to) {
  const ArrayId master{chunk, ArrayKind::kMaster};
  const ChunkSpec& spec = store_.chunk(chunk);
  await_on_device(master);
  device_compute().cast_from_float(static_cast<const float*>(array(master).device_buffer.data), to, spec.dtype,
                                   spec.shard_numel);
}

void ChunkMemory::cast_on_host(ChunkId chunk, void* to) {
  const ChunkSpec& spec = store_.chunk(chunk);
  const TraceScope stall(tracer_, {Track::kStall, StallCause::kHostWork, layout().param_resting_tier(chunk)});
  host_compute().cast_from_float(static_cast<const float*>(array({chunk, ArrayKind::kMaster}).block.data), to,
                                 spec.dtype, spec.shard_numel);
}

void ChunkMemory::dequantize(Queue queue, ChunkId chunk, void* quantized, void* to) {
  const ChunkSpec& spec = store_.chunk(chunk);
  std::vector<quant::DequantizeJob> jobs;
  for (ParamId param : spec.params) {
    const QuantizedPart part = layout().quantized_part(param, quantized);
    void* const out = element_at(to, layout().shard_of(param).offset, spec.dtype);
    if (part.numel > 0) jobs.push_back({part, out, spec.dtype});
  }
  backend().enqueue(queue,
                    [&quantizer = device_.device_quantizer(), jobs = std::move(jobs)] { quantizer.dequantize(jobs); });
}

bool ChunkMemory::present(Queue queue, ChunkId chunk) {
  const ChunkSpec& spec = store_.chunk(chunk);
  if (!has_format() || !spec.trainable) return false;
  for (ParamId param : spec.params) present_param(queue, param);
  return true;
}

void ChunkMemory::present_param(Queue queue, ParamId param) {
  const Placement& placement = layout().placement(param);
  const ChunkSpec& spec = store_.chunk(placement.chunk);
  if (!has_format() || !spec.trainable) return;
  char* const chunk = static_cast<char*>(array({placement.chunk, ArrayKind::kParam}).device_buffer.data);
  void* const values = chunk + placement.offset * element_size(spec.dtype);
  const std::vector<int64_t>& shape = shapes_[static_cast<size_t>(param)];
  backend().enqueue(queue, [this, &shape, values, dtype = spec.dtype] { format_->round(shape, dtype, values); });
}

void ChunkMemory::clear_block(ArrayId id) {
  char* data = static_cast<char*>(array(id).block.data);
  const TraceScope stall(tracer_, {Track::kStall, StallCause::kHostWork, id});
  device_.pool().parallel_for(store_.num_bytes(id), kCopyGrain, [data](int64_t begin, int64_t end) {
    std::memset(data + begin, 0, static_cast<size_t>(end - begin));
  });
}

}  // namespace patrickstar
