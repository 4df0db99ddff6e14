// The CPUs that this process may use, with their cores and NUMA nodes, and the cgroup's CPU quota.
//
// A CPU is a logical processor. A core is named by its lowest CPU; hyper-threading gives it several. A node is memory
// and the CPUs near it. Missing information is never an error: each CPU then counts as a core, on one node, without a
// quota. Any thread.
//
//   CpuTopology topology = read_cpu_topology(allowed_cpus());
//   topology.cpus[0];   // {id 0, core 0, node 0}
#pragma once

#include <limits>
#include <string>
#include <vector>

namespace patrickstar {

struct Cpu {
  int id = 0;
  int core = 0;
  int node = 0;
};

constexpr double kNoCpuQuota = std::numeric_limits<double>::infinity();

struct CpuTopology {
  std::vector<Cpu> cpus;            // ascending ids
  double quota_cpus = kNoCpuQuota;  // seconds of CPU time per second; may be fractional

  bool is_limited() const { return quota_cpus < static_cast<double>(cpus.size()); }
};

// The calling thread's affinity mask, ascending.
std::vector<int> allowed_cpus();

// Reads /sys and /proc below `root`.
CpuTopology read_cpu_topology(const std::vector<int>& cpus, const std::string& root = "");

// CPUs of the affinity mask, limited by the cgroup's quota.
int num_available_cpus();

// The kernel's notation, "0-3,8,10-11". Parsing stops at the first invalid character.
std::vector<int> parse_cpu_list(const std::string& text);
std::string format_cpu_list(std::vector<int> cpus);

}  // namespace patrickstar
