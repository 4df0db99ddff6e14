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

namespace nb = nanobind;

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

void register_communicator(nb::module_& module) {
  nb::class_<Communicator>(module, "Communicator",
                           "Collectives of a group of ranks on whole chunks (collective/communicator.h).")
      .def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("size", &Communicator::size)
      .def(
          "all_gather",
          [](Communicator& self, Address whole, int64_t shard_bytes) {
            self.all_gather(pointer<void>(whole), shard_bytes);
          },
          nb::arg("whole"), nb::arg("shard_bytes"), ReleaseGil())
      .def(
          "reduce_scatter_mean",
          [](Communicator& self, Address whole, Address shard, Address scratch, int64_t shard_numel, DType dtype) {
            self.reduce_scatter_mean(pointer<void>(whole), pointer<void>(shard), pointer<void>(scratch), shard_numel,
                                     dtype);
          },
          nb::arg("whole"), nb::arg("shard"), nb::arg("scratch"), nb::arg("shard_numel"), nb::arg("dtype"),
          ReleaseGil())
      .def(
          "exchange",
          [](Communicator& self, const Messages& sends, const Messages& receives) {
            self.exchange(peer_bytes(sends), peer_bytes(receives));
          },
          nb::arg("sends"), nb::arg("receives"), "Exchanges messages with other ranks: (peer, address, bytes) each.",
          ReleaseGil())
      .def("abort", &Communicator::abort, "Aborts running collectives after a failure; any thread.", ReleaseGil())
      .def("check", &Communicator::check, "Raises RankFailure when the communicator has failed.", ReleaseGil())
      .def("oldest_pending_seconds", &Communicator::oldest_pending_seconds, ReleaseGil())
      .def("close", &Communicator::close, "Frees its resources without waiting for other ranks.", ReleaseGil());
  nb::class_<ControlGroup>(module, "ControlGroup", "Exchanges small values between ranks through the hosts.")
      .def_prop_ro("rank", &ControlGroup::rank)
      .def_prop_ro("size", &ControlGroup::size)
      .def(
          "exchange",
          [](ControlGroup& self, const nb::bytes& mine, const std::string& what) {
            const std::string value(mine.c_str(), mine.size());
            std::vector<std::string> values;
            {
              const nb::gil_scoped_release release;
              values = self.exchange(what, value);
            }
            nb::list result;
            for (const std::string& item : values) result.append(nb::bytes(item.data(), item.size()));
            return result;
          },
          nb::arg("mine"), nb::arg("what") = "",
          "Returns every rank's value, by rank. Raises RankFailure, RankMismatch.")
      .def(
          "distribute",
          [](ControlGroup& self, const std::vector<nb::bytes>& to_each, const std::string& what) {
            std::vector<std::string> mine;
            for (const nb::bytes& item : to_each) mine.emplace_back(item.c_str(), item.size());
            std::vector<std::string> values;
            {
              const nb::gil_scoped_release release;
              values = self.distribute(what, mine);
            }
            nb::list result;
            for (const std::string& item : values) result.append(nb::bytes(item.data(), item.size()));
            return result;
          },
          nb::arg("to_each"), nb::arg("what") = "",
          "Sends one value to each rank and returns those received, by rank. Raises as exchange.")
      .def("enter", &ControlGroup::enter, nb::arg("call"), "Sets the call that this rank is in; empty: none.")
      .def_prop_ro("call", &ControlGroup::call)
      .def("abort", &ControlGroup::abort, "Aborts running collectives after a failure; any thread.", ReleaseGil())
      .def("close", &ControlGroup::close, "Frees its resources without waiting for other ranks.", ReleaseGil());
}

void register_groups(nb::module_& module) {
  // shared_ptr: the runtime keeps objects that Python made.
  module.def("make_single_communicator", [] { return std::shared_ptr<Communicator>(make_single_communicator()); });
  module.def("make_single_control", [] { return std::shared_ptr<ControlGroup>(make_single_control()); });
  module.def(
      "make_c10d_communicator",
      [](const std::string& group_name, const Members& members) {
        return std::shared_ptr<Communicator>(make_c10d_communicator(group_name, members));
      },
      nb::arg("group_name"), nb::arg("members") = Members(), ReleaseGil());
  module.def(
      "make_c10d_control",
      [](const std::string& group_name, double timeout_seconds, const Members& members) {
        return std::shared_ptr<ControlGroup>(make_c10d_control(group_name, timeout_seconds, members));
      },
      nb::arg("group_name"), nb::arg("timeout_seconds"), nb::arg("members") = Members(), ReleaseGil());
}

#ifdef PATRICKSTAR_WITH_CUDA
void register_cuda_groups(nb::module_& module) {
  module.def(
      "make_cuda_single_communicator",
      [](int device) { return std::shared_ptr<Communicator>(make_cuda_single_communicator(device)); },
      nb::arg("device"));
  module.def("nccl_version", &nccl_version);
  module.def("make_nccl_id", [] {
    const std::string id = make_nccl_id();
    return nb::bytes(id.data(), id.size());
  });
  module.def(
      "make_nccl_communicator",
      [](const nb::bytes& id, int rank, int size, int device, const Members& members) {
        const std::string bytes(id.c_str(), id.size());
        const nb::gil_scoped_release release;
        return std::shared_ptr<Communicator>(make_nccl_communicator(bytes, rank, size, device, members));
      },
      nb::arg("id"), nb::kw_only(), nb::arg("rank"), nb::arg("size"), nb::arg("device"),
      nb::arg("members") = Members());
  module.def(
      "make_cuda_staged_communicator",
      [](const std::string& group_name, int device, const Members& members) {
        return std::shared_ptr<Communicator>(
            make_cuda_staged_communicator(make_c10d_communicator(group_name, members), device, members));
      },
      nb::arg("group_name"), nb::kw_only(), nb::arg("device"), nb::arg("members") = Members(), ReleaseGil());
  module.def(
      "cuda_mean_of_ranks",
      [](Address shards, int num_ranks, Address out, DType dtype, int64_t numel, Address stream) {
        check_mean(num_ranks, numel);
        cuda::mean_of_ranks(pointer<void>(shards), num_ranks, pointer<void>(out), dtype, numel,
                            reinterpret_cast<cudaStream_t>(stream));
      },
      nb::arg("shards"), nb::arg("num_ranks"), nb::arg("out"), nb::arg("dtype"), nb::arg("numel"), nb::arg("stream"),
      ReleaseGil());
}
#endif

}  // namespace

void register_collective(nb::module_& module) {
  nb::module_ collective = module.def_submodule("collective", "Groups of ranks and their collectives.");
  register_communicator(collective);
  register_groups(collective);
  collective.def(
      "mean_of_ranks",
      [](Address shards, int num_ranks, Address out, DType dtype, int64_t numel) {
        check_mean(num_ranks, numel);
        mean_of_ranks(pointer<void>(shards), num_ranks, pointer<void>(out), dtype, numel);
      },
      nb::arg("shards"), nb::arg("num_ranks"), nb::arg("out"), nb::arg("dtype"), nb::arg("numel"), ReleaseGil());
#ifdef PATRICKSTAR_WITH_CUDA
  register_cuda_groups(collective);
#endif
}

}  // namespace patrickstar::bind
