// Rules of the runtime's calls, one row each: the step states in which a call is allowed, and the work before it.
//
//   begin_call(open, Call::kReadValues, CallChunks::of(chunk));   // throws StateError if the rule refuses the call
//
// Guarded by the engine's lock.
#pragma once

#include <cstdint>
#include <vector>

#include "common/types.h"
#include "engine/open_engine.h"

namespace patrickstar {

enum class Call : uint8_t {
  kInspect,       // facts of the core, and memory that belongs to no array
  kDevice,        // kInspect in the order of the compute queue
  kLendDevice,    // device memory goes to others, or chunks come back to it
  kReadValues,    // values without speculative updates
  kWriteValues,   // values or step counts, which speculative updates have read
  kGiveUpValues,  // values belong to another owner from now on
  kChangeChunks,  // trained chunks, or their resting tiers
  kGradients,     // gradients, from backward to step
  kBeginForward,
  kEndForward,
  kUndoForward,
  kUse,
  kBeginBackward,
  kAccumulate,
  kEndBackward,
  kAbort,  // an exception left a forward or a backward
  kSumGradients,
  kApplyStep,
  kSkipStep,
  kDropStep,
  kClearGradients,
};

// Chunks that a call concerns.
class CallChunks {
 public:
  static CallChunks all() { return {}; }
  static CallChunks of(ChunkId chunk) {
    CallChunks chunks;
    chunks.chunk = chunk;
    return chunks;
  }
  // The caller keeps `params`.
  static CallChunks of(const std::vector<ParamId>& params) {
    CallChunks chunks;
    chunks.params = &params;
    return chunks;
  }

  const std::vector<ParamId>* params = nullptr;  // the chunks of these parameters; null: not given
  ChunkId chunk = -1;                            // -1: not given
};

// Throws StateError if the rule refuses the call; nothing has changed then.
void begin_call(OpenEngine& open, Call call, const CallChunks& chunks);

}  // namespace patrickstar
