#include "bind/bind.h"
#include "common/crc32c.h"

namespace nb = nanobind;

namespace patrickstar::bind {

namespace {

// The contiguous bytes of a Python buffer, held while this lives.
class Bytes {
 public:
  explicit Bytes(const nb::object& buffer) {
    if (PyObject_GetBuffer(buffer.ptr(), &view_, PyBUF_SIMPLE) != 0) nb::raise_python_error();
  }
  ~Bytes() { PyBuffer_Release(&view_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  const void* data() const { return view_.buf; }
  size_t size() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

template <uint32_t (*function)(uint32_t, const void*, size_t)>
uint32_t checksum(const nb::object& data, uint32_t crc) {
  const Bytes bytes(data);
  const nb::gil_scoped_release release;
  return function(crc, bytes.data(), bytes.size());
}

}  // namespace

void register_checksum(nb::module_& module) {
  module.def("crc32c", &checksum<crc32c>, nb::arg("data"), nb::arg("crc") = 0,
             "CRC-32C of the bytes of a contiguous buffer, after those of checksum crc (common/crc32c.h).");
  module.def("joined_crc32c", &joined_crc32c, nb::arg("first"), nb::arg("second"), nb::arg("second_bytes"),
             "CRC-32C of bytes that are followed by second_bytes others, from both checksums (common/crc32c.h).");
  module.def("crc32c_portable", &checksum<crc32c_portable>, nb::arg("data"), nb::arg("crc") = 0,
             "crc32c by table lookup, on any processor.");
}

}  // namespace patrickstar::bind
