// Chooses the number of host compute threads and their CPUs from the machine and the options. Pure function.
//
// Launching core: on a GPU the thread that launches kernels limits the step's speed. The first core of the process's
// share, with all its hyper-threads, is reserved for it, and host threads have a lower priority. Every other CPU gets a
// thread. The pool's caller counts as one of them but is never pinned; it may be the launching thread.
//
// Shares: process k of n takes the k-th of n runs of adjacent cores, and so stays on one node where possible. A mask
// shared by several processes looks like one that a launcher cut for this process (numactl, Slurm). `num_sharing` tells
// them apart; 1 means that the mask is this process's alone.
//
// Quota: a quota below the number of CPUs is time on any CPU. Pinned threads would wait for other processes' threads
// while other CPUs idle, so the number of threads is limited and none is pinned.
//
//   HostThreads threads = choose_host_threads(read_cpu_topology(allowed_cpus()), options);
//   ThreadPool pool(threads.num_threads, threads.worker_cpus);
#pragma once

#include <vector>

#include "common/cpu_topology.h"
#include "common/thread_priority.h"

namespace patrickstar {

enum class Affinity {
  kPinned,  // one CPU per worker
  kFree,    // the system places threads
};

// Use of the core of the thread that launches device work.
enum class LaunchingCore { kReserved, kShared };

struct HostThreadOptions {
  int num_threads = 0;  // including the pool's caller; 0: one per CPU
  Affinity affinity = Affinity::kFree;
  LaunchingCore launching_core = LaunchingCore::kShared;
  int sharing_index = 0;  // index of this process among those that share the CPUs
  int num_sharing = 1;    // processes that may use the same CPUs
};

struct HostThreads {
  int num_threads = 1;           // including the caller
  std::vector<int> worker_cpus;  // by worker; workers beyond the list are not pinned
  std::vector<int> nodes;        // NUMA nodes of the threads, ascending
  ThreadPriority priority = ThreadPriority::kUsual;
};

// Physical cores come before second hyper-threads. Each of the two sets is spread over nodes in proportion to their
// CPUs. Throws ArgumentError for impossible options.
HostThreads choose_host_threads(const CpuTopology& topology, const HostThreadOptions& options);

}  // namespace patrickstar
