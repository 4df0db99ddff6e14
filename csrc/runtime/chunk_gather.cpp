#include "runtime/chunk_gather.h"

namespace patrickstar {

ChunkGather::ChunkGather(Core core, Pager& pager) : core_(core), pager_(pager) {
  core_.collectives.set_num_chunks(core_.store.layout().num_chunks());
  core_.collectives.set_gather([this](ChunkId chunk) { gather(chunk); });
}

ChunkGather::~ChunkGather() { core_.collectives.set_gather({}); }

void ChunkGather::gather(ChunkId chunk) {
  const Layout& layout = core_.store.layout();
  const ArrayId id{chunk, ArrayKind::kParam};
  const int64_t num_bytes = layout.num_bytes(id);
  const int64_t shard_bytes = layout.num_bytes({chunk, ArrayKind::kParamShard});
  ArrayRecord& array = core_.store.array(id);
  const ScopedHold hold(array);
  pager_.ensure_slot(id);
  char* place = static_cast<char*>(array.slot.data) + layout.sharding().rank * shard_bytes;
  core_.backend.wait(Queue::kGather, place_shard(chunk, place, array.slot));
  {
    const TraceScope span(core_.tracer, {Track::kGather, StallCause::kNone, id, num_bytes - shard_bytes});
    core_.backend.enqueue(Queue::kGather, [&group = core_.collectives.gather_group(), whole = array.slot.data,
                                           shard_bytes] { group.all_gather(whole, shard_bytes); });
  }
  core_.counters.gathered_bytes += num_bytes - shard_bytes;
  array.device_ready = core_.backend.record(Queue::kGather);
  array.slot.busy = {array.device_ready, nullptr};
  pager_.set_on_device(id);
}

Event ChunkGather::place_shard(ChunkId chunk, void* place, const Slot& slot) {
  const ArrayId shard{chunk, ArrayKind::kParamShard};
  const ArrayId master{chunk, ArrayKind::kMaster};
  const ArrayRecord& record = core_.store.array(master);
  if (!record.on_device) {
    pager_.bring_to_host(shard);
    return core_.transfer.upload_to(shard, place, slot);
  }
  const ChunkSpec& spec = core_.store.layout().chunk(chunk);
  core_.transfer.await_on_device(master);
  core_.transfer.await_slot(Queue::kCompute, slot);
  core_.device_compute.cast_from_float(static_cast<const float*>(record.slot.data), place, spec.dtype,
                                       spec.shard_numel);
  return core_.backend.record(Queue::kCompute);
}

}  // namespace patrickstar
