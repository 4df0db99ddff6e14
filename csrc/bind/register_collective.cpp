#include "bind/bind.h"

#ifdef PATRICKSTAR_WITH_CUDA
#include "collective/communicator.h"

namespace py = pybind11;

namespace patrickstar::bind {

void register_collective(py::module_& module) {
  py::module_ nccl = module.def_submodule("nccl", "NCCL collectives on whole chunks.");
  nccl.def("version", &nccl_version);
  nccl.def("make_id", [] { return py::bytes(make_nccl_id()); });
  py::class_<Communicator>(nccl, "Communicator")
      .def(py::init([](const py::bytes& id, int rank, int size, int device) {
             const std::string bytes = id;
             const py::gil_scoped_release release;
             return make_nccl_communicator(bytes, rank, size, device);
           }),
           py::arg("id"), py::kw_only(), py::arg("rank"), py::arg("size"), py::arg("device"))
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def(
          "all_gather",
          [](Communicator& self, uintptr_t shard, uintptr_t whole, int64_t shard_numel, DType dtype, uintptr_t stream) {
            self.all_gather(reinterpret_cast<const void*>(shard), reinterpret_cast<void*>(whole), shard_numel, dtype,
                            reinterpret_cast<cudaStream_t>(stream));
          })
      .def("reduce_scatter", [](Communicator& self, uintptr_t whole, uintptr_t shard, int64_t shard_numel, DType dtype,
                                uintptr_t stream) {
        self.reduce_scatter(reinterpret_cast<const void*>(whole), reinterpret_cast<void*>(shard), shard_numel, dtype,
                            reinterpret_cast<cudaStream_t>(stream));
      });
}

}  // namespace patrickstar::bind
#else
namespace patrickstar::bind {
void register_collective(pybind11::module_&) {}
}  // namespace patrickstar::bind
#endif
