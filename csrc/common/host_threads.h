// How many threads compute on the host, and on which CPUs: a pure function of the machine and of the options.
//
// [Note: the launching thread's core] On a GPU the thread that launches kernels decides how fast a step can be, so the
// first core of the process's share, with all of its hyper-threads, is left to it. Of the others each CPU gets a
// thread. The thread that calls the pool works along and is one of them, but is never pinned: it may be the launching
// thread itself, or has the last CPU of the share and the launching thread's core to choose from.
//
// [Note: shares of CPUs] Processes that may use the same CPUs divide them: process k of n takes the k-th of n runs of
// neighbouring cores, so it stays on one node where it can. From inside, a mask that is shared looks like one that a
// launcher has cut to size for this process alone (numactl, Slurm); so the number of those that share is an option, and
// 1 where each has CPUs of its own.
//
// [Note: quota] A quota below the number of CPUs is time on any of them. Threads pinned to a few would wait there for
// the neighbours' threads while others idle, so the number of threads is limited and none is pinned.
//
//   HostThreads threads = choose_host_threads(read_cpu_topology(allowed_cpus()), options);
//   ThreadPool pool(threads.num_threads, threads.worker_cpus);
#pragma once

#include <vector>

#include "common/cpu_topology.h"

namespace patrickstar {

enum class Affinity {
  kPinned,  // each worker has a CPU of its own
  kFree,    // the system places threads
};

// What becomes of the core of the thread that launches the device's work.
enum class LaunchingCore { kReserved, kShared };

struct HostThreadOptions {
  int num_threads = 0;  // including the caller of the pool; 0: one for each CPU
  Affinity affinity = Affinity::kFree;
  LaunchingCore launching_core = LaunchingCore::kShared;
  int sharing_index = 0;  // which of those that share the CPUs this process is
  int num_sharing = 1;    // processes that may use the same CPUs
};

struct HostThreads {
  int num_threads = 1;           // including the caller
  std::vector<int> worker_cpus;  // of the workers in order, one each; fewer than workers: the others are free
  std::vector<int> nodes;        // where the threads may run, ascending
};

// Physical cores come before further hyper-threads of cores that have a thread already, and each is spread over the
// nodes in proportion to their CPUs, so that any number of threads is. Throws ArgumentError for impossible options.
HostThreads choose_host_threads(const CpuTopology& topology, const HostThreadOptions& options);

}  // namespace patrickstar
