// The CPUs that this process may use: which of them share a core, on which NUMA node each lies, and how much of their
// time the cgroup grants.
//
// Vocabulary. A CPU is what the system schedules on; hyper-threading makes several of one core, which is named by the
// lowest of them. A node is memory and the CPUs near it.
//
// Plain data, read by whoever starts threads (the runtime), from any thread. What the system does not tell is filled in
// with the simplest machine (a core for each CPU, one node, no quota): it is never an error.
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
  double quota_cpus = kNoCpuQuota;  // seconds of CPU time per second: may be a fraction

  // Whether the quota is less than the CPUs could give.
  bool is_limited() const { return quota_cpus < static_cast<double>(cpus.size()); }
};

// The calling thread's affinity mask, ascending: a process's, unless somebody bound its threads one by one.
std::vector<int> allowed_cpus();

// What /sys and /proc below `root` say about `cpus` and about the process's cgroup.
CpuTopology read_cpu_topology(const std::vector<int>& cpus, const std::string& root = "");

// Processors this process may run on: the affinity mask, cut by the cgroup's CPU quota.
int num_available_cpus();

// The kernel's notation, "0-3,8,10-11". Parsing stops at the first thing that is none.
std::vector<int> parse_cpu_list(const std::string& text);
std::string format_cpu_list(std::vector<int> cpus);

}  // namespace patrickstar
