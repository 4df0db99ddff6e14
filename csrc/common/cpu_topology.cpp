#include "common/cpu_topology.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <map>
#include <numeric>
#include <sstream>
#include <thread>

namespace patrickstar {

namespace {

constexpr size_t kMaxMasks = 64;  // of 1024 CPUs each
constexpr int kMaxCpu = 1 << 16;  // bounds a mistyped list

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// CPUs that a cgroup's quota grants. Version 2: cpu.max holds "max 100000" or "150000 100000". Version 1:
// cpu.cfs_quota_us holds -1 for no quota. Microseconds.
double quota_in(const std::string& folder) {
  const auto ratio = [](const std::string& quota_and_period) {
    std::istringstream text(quota_and_period);
    double quota = 0;
    double period = 0;
    return text >> quota >> period && quota > 0 && period > 0 ? quota / period : kNoCpuQuota;
  };
  return std::min(ratio(first_line(folder + "/cpu.max")),
                  ratio(first_line(folder + "/cpu.cfs_quota_us") + " " + first_line(folder + "/cpu.cfs_period_us")));
}

// The least quota of a cgroup and its ancestors. A container may see its own path as "/" or as a path that does not
// exist.
double least_quota(const std::string& mount, std::string path) {
  if (path.empty() || path[0] != '/') path = "/";
  double quota = quota_in(mount);
  for (; path.size() > 1; path.resize(path.rfind('/'))) quota = std::min(quota, quota_in(mount + path));
  return quota;
}

double read_cpu_quota(const std::string& root) {
  const std::string mount = root + "/sys/fs/cgroup";
  double quota = std::min(quota_in(mount), quota_in(mount + "/cpu"));
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // "4:cpu,cpuacct:/path" (version 1) or "0::/path" (version 2)
    std::istringstream fields(line);
    std::string hierarchy;
    std::string controllers;
    std::string path;
    if (!std::getline(fields, hierarchy, ':') || !std::getline(fields, controllers, ':')) continue;
    std::getline(fields, path);
    if (controllers.empty()) quota = std::min(quota, least_quota(mount, path));
    if (("," + controllers + ",").find(",cpu,") != std::string::npos) {
      quota = std::min(quota, least_quota(mount + "/cpu", path));
    }
  }
  return quota;
}

std::map<int, int> read_nodes(const std::string& root) {
  const std::string folder = root + "/sys/devices/system/node/";
  std::map<int, int> node_of;
  for (const int node : parse_cpu_list(first_line(folder + "online"))) {
    for (const int cpu : parse_cpu_list(first_line(folder + "node" + std::to_string(node) + "/cpulist"))) {
      node_of[cpu] = node;
    }
  }
  return node_of;
}

}  // namespace

std::vector<int> allowed_cpus() {
  for (size_t count = 1; count <= kMaxMasks; count *= 2) {
    std::vector<cpu_set_t> masks(count);
    const size_t num_bytes = count * sizeof(cpu_set_t);
    if (sched_getaffinity(0, num_bytes, masks.data()) != 0) {
      if (errno == EINVAL) continue;  // the mask is too small for the system's CPUs
      break;
    }
    std::vector<int> cpus;
    for (size_t cpu = 0; cpu < count * CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET_S(cpu, num_bytes, masks.data())) cpus.push_back(static_cast<int>(cpu));
    }
    return cpus;
  }
  std::vector<int> cpus(std::max(std::thread::hardware_concurrency(), 1u));
  std::iota(cpus.begin(), cpus.end(), 0);
  return cpus;
}

CpuTopology read_cpu_topology(const std::vector<int>& cpus, const std::string& root) {
  const std::map<int, int> node_of = read_nodes(root);
  CpuTopology topology;
  topology.quota_cpus = read_cpu_quota(root);
  for (const int cpu : cpus) {
    const std::string folder = root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology";
    const std::vector<int> siblings = parse_cpu_list(first_line(folder + "/thread_siblings_list"));
    const auto node = node_of.find(cpu);
    topology.cpus.push_back({cpu, siblings.empty() ? cpu : siblings.front(), node == node_of.end() ? 0 : node->second});
  }
  std::sort(topology.cpus.begin(), topology.cpus.end(), [](const Cpu& a, const Cpu& b) { return a.id < b.id; });
  return topology;
}

int num_available_cpus() {
  const auto cpus = static_cast<double>(allowed_cpus().size());
  return std::max(static_cast<int>(std::min(cpus, std::ceil(read_cpu_quota("")))), 1);
}

std::vector<int> parse_cpu_list(const std::string& text) {
  std::istringstream in(text);
  std::vector<int> cpus;
  do {
    int first = 0;
    if (!(in >> first) || first < 0) break;
    int last = first;
    if (in.peek() == '-') {
      in.get();
      if (!(in >> last)) break;
    }
    for (int cpu = first; cpu <= std::min(last, kMaxCpu); ++cpu) cpus.push_back(cpu);
  } while (in.get() == ',');
  std::sort(cpus.begin(), cpus.end());
  cpus.erase(std::unique(cpus.begin(), cpus.end()), cpus.end());
  return cpus;
}

std::string format_cpu_list(std::vector<int> cpus) {
  std::sort(cpus.begin(), cpus.end());
  std::ostringstream out;
  for (size_t begin = 0; begin < cpus.size();) {
    size_t end = begin + 1;
    while (end < cpus.size() && cpus[end] == cpus[end - 1] + 1) ++end;
    out << (begin > 0 ? "," : "") << cpus[begin];
    if (end - begin > 1) out << "-" << cpus[end - 1];
    begin = end;
  }
  return out.str();
}

}  // namespace patrickstar
