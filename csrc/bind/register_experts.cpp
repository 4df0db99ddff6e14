#include "bind/bind.h"
#ifdef PATRICKSTAR_WITH_CUDA
#include "experts/cuda_kernels.h"
#endif

namespace nb = nanobind;

namespace patrickstar::bind {

#ifdef PATRICKSTAR_WITH_CUDA
namespace {

// Addresses of values and of each row's expert, and the number of experts.
using BiasTuple = std::tuple<Address, Address, int64_t>;

patrickstar::experts::cuda::ExpertBias expert_bias(const BiasTuple& bias) {
  const auto [values, experts, num_experts] = bias;
  return {pointer<const void>(values), pointer<const int64_t>(experts), num_experts};
}

patrickstar::experts::cuda::ClampedRows clamped_rows(Address gate_up, const BiasTuple& bias, float alpha, float limit,
                                                     DType dtype, int64_t num_rows, int64_t width) {
  return {pointer<const void>(gate_up), expert_bias(bias), alpha, limit, dtype, num_rows, width};
}

cudaStream_t expert_stream(Address stream) { return reinterpret_cast<cudaStream_t>(stream); }

}  // namespace
#endif

void register_experts(nb::module_& module) {
  nb::module_ experts =
      module.def_submodule("experts", "Kernels between the grouped products of experts (experts/cuda_kernels.h).");
#ifdef PATRICKSTAR_WITH_CUDA
  experts.def(
      "cuda_sum_rows",
      [](Address rows, Address positions, Address weights, const BiasTuple& bias, Address out, DType dtype,
         DType product_dtype, int64_t num_tokens, int num_chosen, int64_t width, Address stream) {
        patrickstar::experts::cuda::sum_rows(
            {pointer<const void>(rows), pointer<const int64_t>(positions), pointer<const float>(weights),
             expert_bias(bias), pointer<void>(out), dtype, product_dtype, num_tokens, num_chosen, width},
            expert_stream(stream));
      },
      "Sum over a token's experts of their weighted rows. ``weights``: float32, or 0 for weights of 1.",
      nb::arg("rows"), nb::arg("positions"), nb::arg("weights"), nb::arg("bias"), nb::arg("out"), nb::arg("dtype"),
      nb::arg("product_dtype"), nb::arg("num_tokens"), nb::arg("num_chosen"), nb::arg("width"), nb::arg("stream"),
      ReleaseGil());
  experts.def(
      "cuda_scale_rows",
      [](Address grad_out, Address rows, Address tokens, Address weights, const BiasTuple& bias, Address grad_rows,
         Address grad_weights, DType dtype, int64_t num_rows, int64_t width, Address stream) {
        patrickstar::experts::cuda::scale_rows(
            {pointer<const void>(grad_out), pointer<const void>(rows), pointer<const int64_t>(tokens),
             pointer<const float>(weights), expert_bias(bias), pointer<void>(grad_rows), pointer<float>(grad_weights),
             dtype, num_rows, width},
            expert_stream(stream));
      },
      "Backward of ``cuda_sum_rows`` with weights. ``weights`` and ``grad_weights``: float32, by row.",
      nb::arg("grad_out"), nb::arg("rows"), nb::arg("tokens"), nb::arg("weights"), nb::arg("bias"),
      nb::arg("grad_rows"), nb::arg("grad_weights"), nb::arg("dtype"), nb::arg("num_rows"), nb::arg("width"),
      nb::arg("stream"), ReleaseGil());
  experts.def(
      "cuda_gate",
      [](Address gate_up, Address out, DType dtype, int64_t num_rows, int64_t width, Address stream) {
        patrickstar::experts::cuda::gate(pointer<const void>(gate_up), pointer<void>(out), dtype, num_rows, width,
                                         expert_stream(stream));
      },
      "SwiGLU of rows that hold gate and up side by side.", nb::arg("gate_up"), nb::arg("out"), nb::arg("dtype"),
      nb::arg("num_rows"), nb::arg("width"), nb::arg("stream"), ReleaseGil());
  experts.def(
      "cuda_gate_backward",
      [](Address gate_up, Address grad_out, Address grad_gate_up, DType dtype, int64_t num_rows, int64_t width,
         Address stream) {
        patrickstar::experts::cuda::gate_backward(pointer<const void>(gate_up), pointer<const void>(grad_out),
                                                  pointer<void>(grad_gate_up), dtype, num_rows, width,
                                                  expert_stream(stream));
      },
      "Backward of ``cuda_gate``.", nb::arg("gate_up"), nb::arg("grad_out"), nb::arg("grad_gate_up"), nb::arg("dtype"),
      nb::arg("num_rows"), nb::arg("width"), nb::arg("stream"), ReleaseGil());
  experts.def(
      "cuda_weighted_gate_backward",
      [](Address gate_up, Address grad_out, Address weights, Address grad_gate_up, Address weighted_out,
         Address grad_weights, DType dtype, int64_t num_rows, int64_t width, Address stream) {
        patrickstar::experts::cuda::weighted_gate_backward(
            {pointer<const void>(gate_up), pointer<const void>(grad_out), pointer<const float>(weights),
             pointer<void>(grad_gate_up), pointer<void>(weighted_out), pointer<float>(grad_weights), dtype, num_rows,
             width},
            expert_stream(stream));
      },
      "Backward of ``cuda_gate`` by the gradient before weighting. ``weights`` and ``grad_weights``: float32, by row.",
      nb::arg("gate_up"), nb::arg("grad_out"), nb::arg("weights"), nb::arg("grad_gate_up"), nb::arg("weighted_out"),
      nb::arg("grad_weights"), nb::arg("dtype"), nb::arg("num_rows"), nb::arg("width"), nb::arg("stream"),
      ReleaseGil());
  experts.def(
      "cuda_clamped_gate",
      [](Address gate_up, const BiasTuple& bias, float alpha, float limit, Address out, DType dtype, int64_t num_rows,
         int64_t width, Address stream) {
        patrickstar::experts::cuda::clamped_gate(clamped_rows(gate_up, bias, alpha, limit, dtype, num_rows, width),
                                                 pointer<void>(out), expert_stream(stream));
      },
      "gpt-oss's gate of rows and their bias, whose columns alternate between gate and up.", nb::arg("gate_up"),
      nb::arg("bias"), nb::arg("alpha"), nb::arg("limit"), nb::arg("out"), nb::arg("dtype"), nb::arg("num_rows"),
      nb::arg("width"), nb::arg("stream"), ReleaseGil());
  experts.def(
      "cuda_clamped_gate_backward",
      [](Address gate_up, const BiasTuple& bias, float alpha, float limit, Address grad_out, Address grad_gate_up,
         DType dtype, int64_t num_rows, int64_t width, Address stream) {
        patrickstar::experts::cuda::clamped_gate_backward(
            clamped_rows(gate_up, bias, alpha, limit, dtype, num_rows, width), pointer<const void>(grad_out),
            pointer<void>(grad_gate_up), expert_stream(stream));
      },
      "Backward of ``cuda_clamped_gate``.", nb::arg("gate_up"), nb::arg("bias"), nb::arg("alpha"), nb::arg("limit"),
      nb::arg("grad_out"), nb::arg("grad_gate_up"), nb::arg("dtype"), nb::arg("num_rows"), nb::arg("width"),
      nb::arg("stream"), ReleaseGil());
#endif
}

}  // namespace patrickstar::bind
