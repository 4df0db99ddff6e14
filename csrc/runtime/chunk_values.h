// Values of parameters and their optimizer states, in and out of chunks: what initialisation, state_dict and
// load_state_dict use. float32 at the border, whatever the chunk holds; one parameter at a time, so that nothing of the
// model's size is ever copied.
//
// Owned by Runtime, guarded by its lock.
#pragma once

#include "runtime/pager.h"

namespace patrickstar {

class ChunkValues {
 public:
  ChunkValues(Core core, Pager& pager) : core_(core), pager_(pager) {}

  // `values` is host memory, in the parameter's memory order. kMaster of a frozen parameter means its compute value.
  // An optimizer array that does not exist yet is made on `home`. Throws StateError while a module that uses the
  // parameter runs.
  void write(ParamId param, ArrayKind kind, const float* values, Tier home);
  // A moment that was never made reads as zeros. Throws ArgumentError for a state of a frozen parameter.
  void read(ParamId param, ArrayKind kind, float* values);

 private:
  void write_frozen(ParamId param, const float* values);
  void read_frozen(ParamId param, float* values);

  Core core_;
  Pager& pager_;
};

}  // namespace patrickstar
