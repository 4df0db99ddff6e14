#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "bind/bind.h"
#include "collective/communicator.h"
#include "collective/rank_mean.h"
#include "common/check.h"
#ifdef PATRICKSTAR_WITH_CUDA
#include "collective/cuda_rank_mean.h"
#endif

namespace py = pybind11;

namespace patrickstar::bind {

namespace {

using Messages = std::vector<std::tuple<int, Address, int64_t>>;

std::vector<PeerBytes> peer_bytes(const Messages& messages) {
  std::vector<PeerBytes> result;
  for (const auto& [peer, address, num_bytes] : messages) result.push_back({peer, pointer<void>(address), num_bytes});
  return result;
}

void check_mean(int num_ranks, int64_t numel) {
  PS_CHECK(num_ranks > 0 && numel >= 0, ArgumentError, "num_ranks is ", num_ranks, " and numel ", numel,
           ", they must be at least 1 and 0; pass the size of the group and of one shard");
}

void register_communicator(py::module_& module) {
  py::class_<Communicator, std::shared_ptr<Communicator>>(
      module, "Communicator", "Collectives of a group of ranks on whole chunks (collective/communicator.h).")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def(
          "all_gather",
          [](Communicator& self, Address whole, int64_t shard_bytes) {
            self.all_gather(pointer<void>(whole), shard_bytes);
          },
          py::arg("whole"), py::arg("shard_bytes"), ReleaseGil())
      .def(
          "reduce_scatter_mean",
          [](Communicator& self, Address whole, Address shard, Address scratch, int64_t shard_numel, DType dtype) {
            self.reduce_scatter_mean(pointer<void>(whole), pointer<void>(shard), pointer<void>(scratch), shard_numel,
                                     dtype);
          },
          py::arg("whole"), py::arg("shard"), py::arg("scratch"), py::arg("shard_numel"), py::arg("dtype"),
          ReleaseGil())
      .def(
          "exchange",
          [](Communicator& self, const Messages& sends, const Messages& receives) {
            self.exchange(peer_bytes(sends), peer_bytes(receives));
          },
          py::arg("sends"), py::arg("receives"), "Exchanges messages with other ranks: (peer, address, bytes) each.",
          ReleaseGil())
      .def("abort", &Communicator::abort, "Aborts running collectives after a failure; any thread.", ReleaseGil())
      .def("check", &Communicator::check, "Raises RankFailure when the communicator has failed.", ReleaseGil())
      .def("oldest_pending_seconds", &Communicator::oldest_pending_seconds, ReleaseGil())
      .def("close", &Communicator::close, "Frees its resources without waiting for other ranks.", ReleaseGil());
  py::class_<ControlGroup, std::shared_ptr<ControlGroup>>(module, "ControlGroup",
                                                          "Exchanges small values between ranks through the hosts.")
      .def_property_readonly("rank", &ControlGroup::rank)
      .def_property_readonly("size", &ControlGroup::size)
      .def(
          "exchange",
          [](ControlGroup& self, const py::bytes& mine, const std::string& what) {
            const std::string value = mine;
            std::vector<std::string> values;
            {
              const py::gil_scoped_release release;
              values = self.exchange(what, value);
            }
            py::list result;
            for (const std::string& item : values) result.append(py::bytes(item));
            return result;
          },
          py::arg("mine"), py::arg("what") = "",
          "Returns every rank's value, by rank. Raises RankFailure, RankMismatch.")
      .def(
          "distribute",
          [](ControlGroup& self, const std::vector<py::bytes>& to_each, const std::string& what) {
            const std::vector<std::string> mine(to_each.begin(), to_each.end());
            std::vector<std::string> values;
            {
              const py::gil_scoped_release release;
              values = self.distribute(what, mine);
            }
            py::list result;
            for (const std::string& item : values) result.append(py::bytes(item));
            return result;
          },
          py::arg("to_each"), py::arg("what") = "",
          "Sends one value to each rank and returns those received, by rank. Raises as exchange.")
      .def("enter", &ControlGroup::enter, py::arg("call"), "Sets the call that this rank is in; empty: none.")
      .def_property_readonly("call", &ControlGroup::call)
      .def("abort", &ControlGroup::abort, "Aborts running collectives after a failure; any thread.", ReleaseGil())
      .def("close", &ControlGroup::close, "Frees its resources without waiting for other ranks.", ReleaseGil());
}

void register_groups(py::module_& module) {
  // shared_ptr: the runtime keeps objects that Python made.
  module.def("make_single_communicator", [] { return std::shared_ptr<Communicator>(make_single_communicator()); });
  module.def("make_single_control", [] { return std::shared_ptr<ControlGroup>(make_single_control()); });
  module.def(
      "make_c10d_communicator",
      [](const std::string& group_name, const Members& members) {
        return std::shared_ptr<Communicator>(make_c10d_communicator(group_name, members));
      },
      py::arg("group_name"), py::arg("members") = Members(), ReleaseGil());
  module.def(
      "make_c10d_control",
      [](const std::string& group_name, double timeout_seconds, const Members& members) {
        return std::shared_ptr<ControlGroup>(make_c10d_control(group_name, timeout_seconds, members));
      },
      py::arg("group_name"), py::arg("timeout_seconds"), py::arg("members") = Members(), ReleaseGil());
}

#ifdef PATRICKSTAR_WITH_CUDA
void register_cuda_groups(py::module_& module) {
  module.def(
      "make_cuda_single_communicator",
      [](int device) { return std::shared_ptr<Communicator>(make_cuda_single_communicator(device)); },
      py::arg("device"));
  module.def("nccl_version", &nccl_version);
  module.def("make_nccl_id", [] { return py::bytes(make_nccl_id()); });
  module.def(
      "make_nccl_communicator",
      [](const py::bytes& id, int rank, int size, int device, const Members& members) {
        const std::string bytes = id;
        const py::gil_scoped_release release;
        return std::shared_ptr<Communicator>(make_nccl_communicator(bytes, rank, size, device, members));
      },
      py::arg("id"), py::kw_only(), py::arg("rank"), py::arg("size"), py::arg("device"),
      py::arg("members") = Members());
  module.def(
      "make_cuda_staged_communicator",
      [](const std::string& group_name, int device, const Members& members) {
        return std::shared_ptr<Communicator>(
            make_cuda_staged_communicator(make_c10d_communicator(group_name, members), device, members));
      },
      py::arg("group_name"), py::kw_only(), py::arg("device"), py::arg("members") = Members(), ReleaseGil());
  module.def(
      "cuda_mean_of_ranks",
      [](Address shards, int num_ranks, Address out, DType dtype, int64_t numel, Address stream) {
        check_mean(num_ranks, numel);
        cuda::mean_of_ranks(pointer<void>(shards), num_ranks, pointer<void>(out), dtype, numel,
                            reinterpret_cast<cudaStream_t>(stream));
      },
      py::arg("shards"), py::arg("num_ranks"), py::arg("out"), py::arg("dtype"), py::arg("numel"), py::arg("stream"),
      ReleaseGil());
}
#endif

}  // namespace

void register_collective(py::module_& module) {
  py::module_ collective = module.def_submodule("collective", "Groups of ranks and their collectives.");
  register_communicator(collective);
  register_groups(collective);
  collective.def(
      "mean_of_ranks",
      [](Address shards, int num_ranks, Address out, DType dtype, int64_t numel) {
        check_mean(num_ranks, numel);
        mean_of_ranks(pointer<void>(shards), num_ranks, pointer<void>(out), dtype, numel);
      },
      py::arg("shards"), py::arg("num_ranks"), py::arg("out"), py::arg("dtype"), py::arg("numel"), ReleaseGil());
#ifdef PATRICKSTAR_WITH_CUDA
  register_cuda_groups(collective);
#endif
}

}  // namespace patrickstar::bind
