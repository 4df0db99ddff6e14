#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "common/check.h"
#include "common/cpu_topology.h"
#include "common/host_threads.h"
#include "common/thread_pool.h"
#include "common/work_queue.h"

namespace nb = nanobind;

namespace patrickstar::bind {

namespace {

void register_topology(nb::module_& module) {
  module.def("num_available_cpus", &num_available_cpus, "Processors this process may run on.");
  module.def("allowed_cpus", &allowed_cpus, "The calling thread's affinity mask, ascending.");
  module.def("parse_cpu_list", &parse_cpu_list, nb::arg("text"),
             "Parses the kernel's CPU list notation, \"0-3,8,10-11\".");
  module.def("format_cpu_list", &format_cpu_list, nb::arg("cpus"), "Formats CPUs in the kernel's list notation.");
  module.def("read_cpu_topology", &read_cpu_topology, nb::arg("cpus"), nb::arg("root") = "",
             "Reads these CPUs' topology from /sys and /proc below root (common/cpu_topology.h).");
  nb::class_<CpuTopology>(module, "CpuTopology", "The CPUs that a process may use (common/cpu_topology.h).")
      .def_prop_ro("cpus",
                   [](const CpuTopology& self) {
                     nb::list cpus;
                     for (const Cpu& cpu : self.cpus) cpus.append(nb::make_tuple(cpu.id, cpu.core, cpu.node));
                     return cpus;
                   })
      .def_ro("quota_cpus", &CpuTopology::quota_cpus);
}

void register_host_threads(nb::module_& module) {
  nb::enum_<Affinity>(module, "Affinity").value("PINNED", Affinity::kPinned).value("FREE", Affinity::kFree);
  nb::enum_<LaunchingCore>(module, "LaunchingCore")
      .value("RESERVED", LaunchingCore::kReserved)
      .value("SHARED", LaunchingCore::kShared);
  nb::class_<HostThreadOptions>(module, "HostThreadOptions",
                                "Options of the host's compute threads (common/host_threads.h).")
      .def(nb::init<>())
      .def_rw("num_threads", &HostThreadOptions::num_threads)
      .def_rw("affinity", &HostThreadOptions::affinity)
      .def_rw("launching_core", &HostThreadOptions::launching_core)
      .def_rw("sharing_index", &HostThreadOptions::sharing_index)
      .def_rw("num_sharing", &HostThreadOptions::num_sharing);
  nb::enum_<ThreadPriority>(module, "ThreadPriority", "Priority of a thread (common/thread_priority.h).")
      .value("USUAL", ThreadPriority::kUsual)
      .value("BELOW_LAUNCHES", ThreadPriority::kBelowLaunches);
  nb::class_<HostThreads>(module, "HostThreads", "Threads, where they are pinned, and their NUMA nodes.")
      .def_ro("num_threads", &HostThreads::num_threads)
      .def_ro("worker_cpus", &HostThreads::worker_cpus)
      .def_ro("nodes", &HostThreads::nodes)
      .def_ro("priority", &HostThreads::priority);
  module.def("choose_host_threads", &choose_host_threads, nb::arg("topology"), nb::arg("options"),
             "Chooses number and CPUs of the compute threads (common/host_threads.h).");
  nb::enum_<Priority>(module, "Priority", "Workers take urgent loops first (common/thread_pool.h).")
      .value("URGENT", Priority::kUrgent)
      .value("BACKGROUND", Priority::kBackground);
  nb::class_<ThreadPool>(module, "ThreadPool", "Threads that share the work of loops (common/thread_pool.h).")
      .def(nb::init<int, const std::vector<int>&, ThreadPriority>(), nb::arg("num_threads"),
           nb::arg("worker_cpus") = std::vector<int>{}, nb::arg("priority") = ThreadPriority::kUsual)
      .def_prop_ro("num_threads", &ThreadPool::num_threads)
      .def_prop_ro("num_urgent", &ThreadPool::num_urgent)
      .def_prop_ro("pinned_cpus", &ThreadPool::pinned_cpus)
      // For tests: one thread at a time calls the function, with the GIL.
      .def(
          "parallel_for",
          [](ThreadPool& self, int64_t size, int64_t grain, const nb::callable& fn, Priority priority) {
            const auto call = [&fn](int64_t begin, int64_t end) {
              const nb::gil_scoped_acquire acquire;
              try {
                fn(begin, end);
              } catch (const nb::python_error& error) {
                throw StateError(error.what());
              }
            };
            const nb::gil_scoped_release release;
            self.parallel_for(size, grain, call, priority);
          },
          nb::arg("size"), nb::arg("grain"), nb::arg("fn"), nb::arg("priority") = Priority::kUrgent,
          "Calls fn(begin, end) on disjoint ranges that cover [0, size).");
}

// For tests: tasks that fail, wait for an event or do nothing, then record their name.
class NotingQueue {
 public:
  std::shared_ptr<HostEvent> submit(const std::string& failure, const std::string& name,
                                    const std::shared_ptr<HostEvent>& after, std::optional<int64_t> rank) {
    std::optional<Need> need;
    if (rank) need = Need{*rank, [after] { return after == nullptr || after->is_over(); }};
    const auto task = [this, failure, name, after] {
      if (after != nullptr) after->wait();
      PS_CHECK(failure.empty(), SystemError, failure);
      const std::lock_guard<std::mutex> lock(mutex_);
      names_.push_back(name);
    };
    return std::static_pointer_cast<HostEvent>(queue_.submit(task, std::move(need)));
  }
  std::vector<std::string> names() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return names_;
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> names_;
  WorkQueue queue_;
};

void register_work_queue(nb::module_& module) {
  nb::class_<HostEvent>(module, "HostEvent", "Completion of host work (common/event.h).")
      .def(init_shared<HostEvent>())
      .def("complete", &HostEvent::complete)
      .def("wait", &HostEvent::wait, ReleaseGil(), "Re-raises the work's error.")
      .def("settle", &HostEvent::settle, ReleaseGil())
      .def_prop_ro("is_over", &HostEvent::is_over);
  nb::class_<NotingQueue>(module, "WorkQueue", "A queue of tasks with a thread of its own (common/work_queue.h).")
      .def(nb::init<>())
      .def("submit", &NotingQueue::submit, nb::arg("failure") = "", nb::arg("name") = "", nb::arg("after") = nb::none(),
           nb::arg("rank") = nb::none())
      .def_prop_ro("names", &NotingQueue::names);
}

}  // namespace

void register_threads(nb::module_& module) {
  register_topology(module);
  register_host_threads(module);
  register_work_queue(module);
}

}  // namespace patrickstar::bind
