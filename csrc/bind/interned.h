// An attribute name as an interned Python string; attr("name") makes and hashes a new string per call.
#pragma once

#include <nanobind/nanobind.h>

namespace patrickstar::bind {

inline nanobind::object interned(const char* name) {
  return nanobind::steal<nanobind::object>(PyUnicode_InternFromString(name));
}

}  // namespace patrickstar::bind
