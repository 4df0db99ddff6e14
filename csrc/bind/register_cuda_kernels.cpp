#ifdef PATRICKSTAR_WITH_CUDA
#include "bind/bind.h"
#include "bind/kernel_arguments.h"
#include "optim/cuda_kernels.h"

namespace nb = nanobind;

namespace patrickstar::bind {

namespace {

cudaStream_t stream_of(Address stream) { return reinterpret_cast<cudaStream_t>(stream); }

}  // namespace

// `stream`: torch.cuda.Stream.cuda_stream. Calls enqueue on the current device and return.
void register_cuda_kernels(nb::module_& module) {
  module.def(
      "cuda_expand_state",
      [](StateType type, Address data, Address scales, Address out, int64_t numel, Address stream) {
        optim::cuda::expand_state(type, pointer<const void>(data), pointer<const float>(scales), pointer<float>(out),
                                  numel, stream_of(stream));
      },
      nb::arg("type"), nb::arg("data"), nb::arg("scales"), nb::arg("out"), nb::arg("numel"), nb::arg("stream"),
      ReleaseGil());
  module.def(
      "cuda_compress_state",
      [](Address in, StateType type, Address out, Address scales, int64_t numel, Address stream,
         const OptionalKey& key) {
        optim::cuda::compress_state(pointer<const float>(in), type, pointer<void>(out), pointer<float>(scales), numel,
                                    key.value_or(optim::RandomKey{}), stream_of(stream));
      },
      nb::arg("in_"), nb::arg("type"), nb::arg("out"), nb::arg("scales"), nb::arg("numel"), nb::arg("stream"),
      nb::kw_only(), nb::arg("key") = nb::none(), ReleaseGil());
  module.def(
      "cuda_cast_from_float",
      [](Address in, Address out, DType out_dtype, int64_t numel, Address stream) {
        optim::cuda::cast_from_float(pointer<const float>(in), pointer<void>(out), out_dtype, numel, stream_of(stream));
      },
      nb::arg("in_"), nb::arg("out"), nb::arg("out_dtype"), nb::arg("numel"), nb::arg("stream"), ReleaseGil());
  module.def(
      "cuda_cast_to_float",
      [](Address in, DType in_dtype, Address out, int64_t numel, Address stream) {
        optim::cuda::cast_to_float(pointer<const void>(in), in_dtype, pointer<float>(out), numel, stream_of(stream));
      },
      nb::arg("in_"), nb::arg("in_dtype"), nb::arg("out"), nb::arg("numel"), nb::arg("stream"), ReleaseGil());
  module.def(
      "cuda_add",
      [](Address sum, Address x, DType dtype, int64_t numel, Address stream) {
        optim::cuda::add(pointer<void>(sum), pointer<const void>(x), dtype, numel, stream_of(stream));
      },
      nb::arg("sum"), nb::arg("x"), nb::arg("dtype"), nb::arg("numel"), nb::arg("stream"), ReleaseGil());
  module.def(
      "cuda_add_to_float",
      [](Address sum, Address x, DType x_dtype, int64_t numel, Address stream) {
        optim::cuda::add_to_float(pointer<float>(sum), pointer<const void>(x), x_dtype, numel, stream_of(stream));
      },
      nb::arg("sum"), nb::arg("x"), nb::arg("x_dtype"), nb::arg("numel"), nb::arg("stream"), ReleaseGil());
  module.def(
      "cuda_sum_squares",
      [](Address x, DType dtype, int64_t numel, Address partials, Address stream) {
        optim::cuda::sum_squares(pointer<const void>(x), dtype, numel, pointer<double>(partials), stream_of(stream));
      },
      nb::arg("x"), nb::arg("dtype"), nb::arg("numel"), nb::arg("partials"), nb::arg("stream"), ReleaseGil());
  module.def(
      "cuda_add_up",
      [](Address partials, Address ranges, int64_t num_ranges, Address sums, Address stream) {
        optim::cuda::add_up(pointer<const double>(partials), pointer<const optim::PartialsRange>(ranges), num_ranges,
                            pointer<optim::WideSum>(sums), stream_of(stream));
      },
      "sums[i] = add_up(partials, *ranges[i]); ranges int64, sums float64, two of each.", nb::arg("partials"),
      nb::arg("ranges"), nb::arg("num_ranges"), nb::arg("sums"), nb::arg("stream"), ReleaseGil());
}

}  // namespace patrickstar::bind
#endif
