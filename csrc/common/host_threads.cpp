#include "common/host_threads.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "common/check.h"

namespace patrickstar {

namespace {

using Cpus = std::vector<Cpu>;

// Cores by node, then by core.
std::vector<Cpus> group_by_core(Cpus cpus) {
  std::sort(cpus.begin(), cpus.end(),
            [](const Cpu& a, const Cpu& b) { return std::tie(a.node, a.core, a.id) < std::tie(b.node, b.core, b.id); });
  std::vector<Cpus> cores;
  for (const Cpu& cpu : cpus) {
    if (cores.empty() || cores.back().front().core != cpu.core) cores.emplace_back();
    cores.back().push_back(cpu);
  }
  return cores;
}

std::vector<Cpus> cores_of_share(const CpuTopology& topology, const HostThreadOptions& options) {
  const auto count = static_cast<size_t>(options.num_sharing);
  const auto index = static_cast<size_t>(options.sharing_index);
  std::vector<Cpus> cores = group_by_core(topology.cpus);
  if (cores.size() < count) {  // too few cores: share the hyper-threads
    std::vector<Cpus> threads;
    for (const Cpus& core : cores) {
      for (const Cpu& cpu : core) threads.push_back({cpu});
    }
    cores = std::move(threads);
  }
  const auto bound = [&](size_t k) { return cores.begin() + static_cast<std::ptrdiff_t>(k * cores.size() / count); };
  return {bound(index), bound(index + 1)};
}

// Removes one core. With a single core, removes one CPU of it; with a single CPU, none.
void reserve_launching_core(std::vector<Cpus>& cores) {
  if (cores.size() > 1) {
    cores.erase(cores.begin());
  } else if (!cores.empty() && cores.front().size() > 1) {
    cores.front().erase(cores.front().begin());
  }
}

// The order in which threads take CPUs. The k-th of m CPUs of a node sorts at (k + 1/2) / m, so nodes are merged in
// proportion.
std::vector<int> spread(const std::vector<Cpus>& cores) {
  std::map<std::pair<size_t, int>, std::vector<int>> tiers;  // (hyper-thread of its core, node) -> CPUs
  for (const Cpus& core : cores) {
    for (size_t thread = 0; thread < core.size(); ++thread) {
      tiers[{thread, core[thread].node}].push_back(core[thread].id);
    }
  }
  std::vector<std::tuple<size_t, double, int, int>> places;  // hyper-thread, place in its node, node, CPU
  for (const auto& [tier, cpus] : tiers) {
    for (size_t k = 0; k < cpus.size(); ++k) {
      const double place = static_cast<double>(2 * k + 1) / static_cast<double>(2 * cpus.size());
      places.emplace_back(tier.first, place, tier.second, cpus[k]);
    }
  }
  std::sort(places.begin(), places.end());
  std::vector<int> order;
  for (const auto& place : places) order.push_back(std::get<3>(place));
  return order;
}

// Most threads that the quota allows.
int most_threads(const CpuTopology& topology, const HostThreadOptions& options, size_t num_cpus) {
  auto most = static_cast<int>(num_cpus);
  if (topology.is_limited()) {
    const auto share = static_cast<int>(std::ceil(topology.quota_cpus / options.num_sharing));
    most = std::min(most, share - (options.launching_core == LaunchingCore::kReserved ? 1 : 0));
  }
  return std::max(most, 1);
}

// NUMA nodes of `cpus`; of all CPUs if `cpus` is empty.
std::vector<int> nodes_of(const CpuTopology& topology, const std::vector<int>& cpus) {
  std::set<int> nodes;
  for (const Cpu& cpu : topology.cpus) {
    if (cpus.empty() || std::find(cpus.begin(), cpus.end(), cpu.id) != cpus.end()) nodes.insert(cpu.node);
  }
  return {nodes.begin(), nodes.end()};
}

}  // namespace

HostThreads choose_host_threads(const CpuTopology& topology, const HostThreadOptions& options) {
  PS_CHECK(options.num_threads >= 0, ArgumentError, "host_threads.num_threads is ", options.num_threads,
           "; give 1 or more, or 0 for one per CPU");
  PS_CHECK(options.num_sharing >= 1 && options.sharing_index >= 0 && options.sharing_index < options.num_sharing,
           ArgumentError, "process ", options.sharing_index, " of ", options.num_sharing,
           " that share CPUs; give a number of 1 or more, and an index from 0 to that less 1");
  std::vector<Cpus> cores = cores_of_share(topology, options);
  HostThreads threads;
  if (options.launching_core == LaunchingCore::kReserved) {
    reserve_launching_core(cores);
    threads.priority = ThreadPriority::kBelowLaunches;
  }
  const std::vector<int> order = spread(cores);
  threads.num_threads = options.num_threads > 0 ? options.num_threads : most_threads(topology, options, order.size());
  if (options.affinity == Affinity::kPinned && !topology.is_limited()) {
    const size_t num_pinned = std::min(static_cast<size_t>(threads.num_threads - 1), order.size());
    threads.worker_cpus.assign(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(num_pinned));
  }
  threads.nodes = nodes_of(topology, threads.worker_cpus);
  return threads;
}

}  // namespace patrickstar
