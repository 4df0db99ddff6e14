#include "engine/array_bytes.h"

#include <cstring>

namespace patrickstar {

void ArrayBytes::write(ArrayId id, int64_t offset_bytes, ParamBytes from, int64_t num_bytes) {
  ArrayRecord& record = memory_.array(id);
  if (!record.on_device) {
    pager_.bring_to_host(id);
    copy_to_host(static_cast<char*>(record.block.data) + offset_bytes, from, num_bytes);
    record.set_on_host();
    return;
  }
  enqueue_to_device_buffer(id, offset_bytes, from.data, num_bytes);
  memory_.backend().synchronize(memory_.backend().record(Queue::kCompute));
  if (record.holds == 0 || !record.on_host) {
    record.set_on_device();
    return;
  }
  memory_.await_on_host(id);
  copy_to_host(static_cast<char*>(record.block.data) + offset_bytes, from, num_bytes);
}

void ArrayBytes::enqueue_to_device_buffer(ArrayId id, int64_t offset_bytes, const void* from, int64_t num_bytes) {
  memory_.await_on_device(id);
  if (num_bytes == 0) return;
  memory_.backend().copy(Queue::kCompute, static_cast<char*>(memory_.array(id).device_buffer.data) + offset_bytes, from,
                         num_bytes);
}

void ArrayBytes::read(ArrayId id, int64_t offset_bytes, void* to, int64_t num_bytes) {
  const ArrayRecord& record = memory_.array(id);
  if (!record.on_device) {
    pager_.bring_to_host(id);
    std::memcpy(to, static_cast<const char*>(record.block.data) + offset_bytes, static_cast<size_t>(num_bytes));
    return;
  }
  memory_.await_on_device(id);
  memory_.backend().wait(Queue::kDownload, memory_.backend().record(Queue::kCompute));
  memory_.backend().copy(Queue::kDownload, to,
                         static_cast<const char*>(memory_.array(id).device_buffer.data) + offset_bytes, num_bytes);
  memory_.backend().synchronize(memory_.backend().record(Queue::kDownload));
}

void ArrayBytes::copy_to_host(void* to, ParamBytes from, int64_t num_bytes) {
  if (from.where == Tier::kDevice) {
    memory_.backend().copy(Queue::kCompute, to, from.data, num_bytes);
    memory_.backend().synchronize(memory_.backend().record(Queue::kCompute));
    return;
  }
  memory_.device().pool().parallel_for(num_bytes, kCopyGrain, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from.data) + begin,
                static_cast<size_t>(end - begin));
  });
}

}  // namespace patrickstar
