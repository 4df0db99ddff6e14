#ifdef PATRICKSTAR_WITH_CUDA
#include <pybind11/stl.h>

#include "bind/adam_scalars.h"
#include "bind/bind.h"
#include "bind/kernel_arguments.h"
#include "optim/cuda_kernels.h"

namespace py = pybind11;

namespace patrickstar::bind {

namespace {

cudaStream_t stream_of(Address stream) { return reinterpret_cast<cudaStream_t>(stream); }

}  // namespace

// `stream`: torch.cuda.Stream.cuda_stream. Calls enqueue on the current device and return.
void register_cuda_kernels(py::module_& module) {
  module.def(
      "cuda_adam",
      [](const StateArray& master, const StateArray& momentum, const StateArray& variance, Address grad,
         DType grad_dtype, Address param, DType param_dtype, int64_t numel, Address stream, const OptionalKey& key,
         const py::kwargs& scalars_by_name) {
        const AdamArrays arrays{master, momentum,   variance,    grad,
                                param,  grad_dtype, param_dtype, key.value_or(optim::RandomKey{})};
        const optim::AdamScalars scalars = scalars_of(scalars_by_name);
        check_arrays(arrays, numel);
        const py::gil_scoped_release release;
        optim::cuda::adam(arrays.range(0, numel), scalars, stream_of(stream));
      },
      kAdamDoc, py::arg("master"), py::arg("momentum"), py::arg("variance"), py::arg("grad"), py::arg("grad_dtype"),
      py::arg("param"), py::arg("param_dtype"), py::arg("numel"), py::arg("stream"), py::kw_only(),
      py::arg("key") = py::none());
  module.def(
      "cuda_expand_state",
      [](StateType type, Address data, Address scales, Address out, int64_t numel, Address stream) {
        optim::cuda::expand_state(type, pointer<const void>(data), pointer<const float>(scales), pointer<float>(out),
                                  numel, stream_of(stream));
      },
      py::arg("type"), py::arg("data"), py::arg("scales"), py::arg("out"), py::arg("numel"), py::arg("stream"),
      ReleaseGil());
  module.def(
      "cuda_compress_state",
      [](Address in, StateType type, Address out, Address scales, int64_t numel, Address stream,
         const OptionalKey& key) {
        optim::cuda::compress_state(pointer<const float>(in), type, pointer<void>(out), pointer<float>(scales), numel,
                                    key.value_or(optim::RandomKey{}), stream_of(stream));
      },
      py::arg("in_"), py::arg("type"), py::arg("out"), py::arg("scales"), py::arg("numel"), py::arg("stream"),
      py::kw_only(), py::arg("key") = py::none(), ReleaseGil());
  module.def(
      "cuda_adam_split",
      [](Address lower, Address momentum, Address variance, Address grad, DType grad_dtype, Address param,
         int64_t numel, Address stream, const py::kwargs& scalars_by_name) {
        const AdamArrays arrays{{StateType::kLowerHalf, lower},
                                {StateType::kFloat32, momentum},
                                {StateType::kFloat32, variance},
                                grad,
                                param,
                                grad_dtype,
                                DType::kBFloat16};
        const optim::AdamScalars scalars = scalars_of(scalars_by_name);
        check_arrays(arrays, numel);
        const py::gil_scoped_release release;
        optim::cuda::adam(arrays.range(0, numel), scalars, stream_of(stream));
      },
      py::arg("lower"), py::arg("momentum"), py::arg("variance"), py::arg("grad"), py::arg("grad_dtype"),
      py::arg("param"), py::arg("numel"), py::arg("stream"));
  module.def(
      "cuda_cast_from_float",
      [](Address in, Address out, DType out_dtype, int64_t numel, Address stream) {
        optim::cuda::cast_from_float(pointer<const float>(in), pointer<void>(out), out_dtype, numel, stream_of(stream));
      },
      py::arg("in_"), py::arg("out"), py::arg("out_dtype"), py::arg("numel"), py::arg("stream"), ReleaseGil());
  module.def(
      "cuda_cast_to_float",
      [](Address in, DType in_dtype, Address out, int64_t numel, Address stream) {
        optim::cuda::cast_to_float(pointer<const void>(in), in_dtype, pointer<float>(out), numel, stream_of(stream));
      },
      py::arg("in_"), py::arg("in_dtype"), py::arg("out"), py::arg("numel"), py::arg("stream"), ReleaseGil());
  module.def(
      "cuda_add",
      [](Address sum, Address x, DType dtype, int64_t numel, Address stream) {
        optim::cuda::add(pointer<void>(sum), pointer<const void>(x), dtype, numel, stream_of(stream));
      },
      py::arg("sum"), py::arg("x"), py::arg("dtype"), py::arg("numel"), py::arg("stream"), ReleaseGil());
  module.def(
      "cuda_add_to_float",
      [](Address sum, Address x, DType x_dtype, int64_t numel, Address stream) {
        optim::cuda::add_to_float(pointer<float>(sum), pointer<const void>(x), x_dtype, numel, stream_of(stream));
      },
      py::arg("sum"), py::arg("x"), py::arg("x_dtype"), py::arg("numel"), py::arg("stream"), ReleaseGil());
  module.def(
      "cuda_sum_squares",
      [](Address x, DType dtype, int64_t numel, Address partials, Address stream) {
        optim::cuda::sum_squares(pointer<const void>(x), dtype, numel, pointer<double>(partials), stream_of(stream));
      },
      py::arg("x"), py::arg("dtype"), py::arg("numel"), py::arg("partials"), py::arg("stream"), ReleaseGil());
  module.def(
      "cuda_add_up",
      [](Address partials, Address ranges, int64_t num_ranges, Address sums, Address stream) {
        optim::cuda::add_up(pointer<const double>(partials), pointer<const optim::PartialsRange>(ranges), num_ranges,
                            pointer<optim::WideSum>(sums), stream_of(stream));
      },
      "sums[i] = add_up(partials, *ranges[i]); ranges int64, sums float64, two of each.", py::arg("partials"),
      py::arg("ranges"), py::arg("num_ranges"), py::arg("sums"), py::arg("stream"), ReleaseGil());
}

}  // namespace patrickstar::bind
#endif
