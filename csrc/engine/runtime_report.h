// The report of an engine. Guarded by the device's lock.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/open_engine.h"

namespace patrickstar {

// Figures of a runtime at one time; totals and peaks since reset_report().
struct RuntimeReport {
  int64_t device_budget_bytes = 0;
  int64_t device_peak_bytes = 0;
  int64_t device_activation_bytes = 0;
  int64_t device_chunk_buffer_bytes = 0;
  int64_t host_budget_bytes = 0;
  int64_t host_bytes = 0;
  int64_t host_peak_bytes = 0;
  int64_t predicted_host_peak_bytes = 0;
  Counters counters;
  std::vector<int> interleaved_nodes;
  std::vector<int> pinned_cpus;
  int num_host_threads = 0;
  int num_chunks = 0;
  int64_t chunk_numel = 0;
  int64_t num_chunk_elements = 0;  // padding included
  int num_device_state_chunks = 0;
  int num_device_quantized_chunks = 0;  // chunks whose codes and scales are on the device
  int num_disk_chunks = 0;              // chunks whose states are on the disk
  int64_t disk_bytes = 0;               // of the file
  std::string disk_io;                  // DiskFile::how
  int64_t num_values_in_place = 0;      // in-place speculative updates before the norm, since the engine was opened
  double disk_wait_seconds = 0;  // time that updates waited for states from the disk, since the engine was opened
  int64_t planned_uploaded_bytes = 0;
  int64_t planned_downloaded_bytes = 0;
  double predicted_step_seconds = 0;  // 0: no step was measured
};

RuntimeReport report_of(OpenEngine& open);

}  // namespace patrickstar
