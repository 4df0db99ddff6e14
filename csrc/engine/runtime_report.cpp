#include "engine/runtime_report.h"

namespace patrickstar {

RuntimeReport report_of(OpenEngine& open) {
  RuntimeReport report;
  report.device_budget_bytes = open.backend().limit_bytes();
  report.device_peak_bytes = open.backend().peak_bytes();
  report.device_activation_bytes = open.backend().activation_bytes();
  report.device_chunk_buffer_bytes = open.memory.device_buffers().used_bytes();
  report.host_budget_bytes = open.memory.arena().limit_bytes();
  report.host_bytes = open.memory.arena().mapped_bytes();
  report.host_peak_bytes = open.memory.arena().peak_mapped_bytes();
  report.predicted_host_peak_bytes = open.residency.predicted_host_peak_bytes();
  report.counters = open.memory.counters();
  report.interleaved_nodes = open.device->interleaved_nodes();
  report.pinned_cpus = open.device->pool().pinned_cpus();
  report.num_host_threads = open.device->pool().num_threads();
  report.num_chunks = open.layout().num_chunks();
  report.chunk_numel = open.layout().chunk_numel();
  for (const ChunkSpec& chunk : open.layout().chunks()) report.num_chunk_elements += chunk.numel;
  for (ChunkId chunk = 0; chunk < open.layout().num_chunks(); ++chunk) {
    int& count =
        open.layout().chunk(chunk).is_quantized() ? report.num_device_quantized_chunks : report.num_device_state_chunks;
    count += open.memory.store().has_states_on_device(chunk) ? 1 : 0;
    report.num_disk_chunks += open.disk.is_resting_tier_of(chunk) ? 1 : 0;
  }
  report.planned_uploaded_bytes = open.pager.plan().uploaded_bytes;
  report.planned_downloaded_bytes = open.pager.plan().downloaded_bytes;
  report.disk_bytes = open.disk.num_bytes();
  report.disk_io = open.disk.how();
  report.num_values_in_place = open.speculation.num_values_in_place();
  report.disk_wait_seconds = open.disk_updates.waited_seconds();
  if (open.planner.predicted()) report.predicted_step_seconds = open.planner.predicted()->seconds;
  return report;
}

}  // namespace patrickstar
