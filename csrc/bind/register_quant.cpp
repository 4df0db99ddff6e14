#include <string>

#include "bind/bind.h"
#include "chunk/layout.h"
#include "common/check.h"
#include "common/isa.h"
#include "common/thread_pool.h"
#include "quant/compute.h"
#include "quant/maps.h"
#ifdef PATRICKSTAR_WITH_CUDA
#include "quant/cuda_kernels.h"
#endif

namespace nb = nanobind;

namespace patrickstar::bind {

namespace {

// A chunk with one parameter; its array has the layout of chunks.
ChunkSpec spec_of(QuantType type, int64_t numel) {
  PS_CHECK(type != QuantType::kNone && numel >= 1, ArgumentError, numel, " elements of type ", quant_type_name(type),
           "; give a type of fewer bits, and at least one element");
  return Layout::pack({{numel, DType::kFloat32, false, {}, type}}, kAlignment).chunk(0);
}

QuantizedPart part_of(QuantType type, Address array, int64_t numel) {
  return spec_of(type, numel).quantized_part(reinterpret_cast<void*>(array), 0, 0, {0, numel, 0});
}

nb::list floats(const float* values, int count) {
  nb::list result;
  for (int i = 0; i < count; ++i) result.append(static_cast<double>(values[i]));
  return result;
}

}  // namespace

void register_quant(nb::module_& module) {
  nb::module_ quant_module = module.def_submodule("quant", "Leaf kernels of quantised values (quant/kernels.h).");
  quant_module.attr("NF4_VALUES") = floats(quant::kNf4Map.values, 16);
  quant_module.attr("DYNAMIC_VALUES") = floats(quant::kDynamicMap.values, 256);
  quant_module.def(
      "num_bytes", [](QuantType type, int64_t numel) { return spec_of(type, numel).num_bytes(ArrayKind::kQuantized); },
      nb::arg("type"), nb::arg("numel"), "Bytes of a quantised parameter of numel elements.");
  quant_module.def(
      "layout",
      [](QuantType type, int64_t numel) {
        constexpr Address kSomewhere = 1 << 12;
        const QuantizedPart part = part_of(type, kSomewhere, numel);
        const auto offset = [](const void* pointer) { return reinterpret_cast<Address>(pointer) - kSomewhere; };
        nb::dict result;
        result["codes"] = offset(part.codes);
        if (type == QuantType::kNf4) result["block_scales"] = offset(part.block_scales);
        result["scales"] = offset(part.scales);
        if (type == QuantType::kNf4) result["offset"] = offset(part.offset);
        return result;
      },
      nb::arg("type"), nb::arg("numel"), "Byte offset of each part in that array.");
  quant_module.def(
      "quantize",
      [](const std::string& isa, QuantType type, Address values, int64_t numel, Address array, int num_threads) {
        ThreadPool pool(num_threads);
        quant::make_host_compute(pool, isa.c_str())
            ->quantize(reinterpret_cast<const float*>(values), numel, part_of(type, array, numel));
      },
      nb::arg("isa"), nb::arg("type"), nb::arg("values"), nb::arg("numel"), nb::arg("array"), nb::arg("num_threads"),
      nb::call_guard<nb::gil_scoped_release>(),
      "Quantises float32 `values` into `array`, num_bytes() of zeros. Raises ValueError unless all are finite.");
  quant_module.def(
      "dequantize",
      [](const std::string& isa, QuantType type, Address array, int64_t numel, Address out, DType dtype,
         int num_threads) {
        ThreadPool pool(num_threads);
        quant::make_host_compute(pool, isa.c_str())
            ->dequantize({{part_of(type, array, numel), reinterpret_cast<void*>(out), dtype}});
      },
      nb::arg("isa"), nb::arg("type"), nb::arg("array"), nb::arg("numel"), nb::arg("out"), nb::arg("dtype"),
      nb::arg("num_threads"), nb::call_guard<nb::gil_scoped_release>(), "Dequantises `array` into `out`.");
#ifdef PATRICKSTAR_WITH_CUDA
  quant_module.def(
      "cuda_dequantize",
      [](QuantType type, Address array, int64_t numel, Address out, DType dtype, Address stream) {
        quant::cuda::dequantize(part_of(type, array, numel), reinterpret_cast<void*>(out), dtype,
                                reinterpret_cast<cudaStream_t>(stream));
      },
      nb::arg("type"), nb::arg("array"), nb::arg("numel"), nb::arg("out"), nb::arg("dtype"), nb::arg("stream"),
      nb::call_guard<nb::gil_scoped_release>(), "dequantize on the device; `stream` is a cudaStream_t.");
#endif
}

}  // namespace patrickstar::bind
