// An attribute name as an interned Python string; attr("name") makes and hashes a new string per call.
#pragma once

#include <pybind11/pybind11.h>

namespace patrickstar::bind {

inline pybind11::object interned(const char* name) {
  return pybind11::reinterpret_steal<pybind11::object>(PyUnicode_InternFromString(name));
}

}  // namespace patrickstar::bind
