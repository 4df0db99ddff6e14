// Rules of the runtime's calls, one row each: in which states of a step a call is allowed, and what comes before it.
//
//   begin_call(open, Call::kReadValues, CallChunks::of(chunk));   // throws StateError, or the call may go on
//
// Guarded by the engine's lock.
#pragma once

#include <cstdint>
#include <vector>

#include "common/types.h"
#include "engine/open_engine.h"

namespace patrickstar {

enum class Call : uint8_t {
  kInspect,       // what the core knows, and memory that is no array's
  kDevice,        // the same, in the order of the compute queue
  kReadValues,    // values, as they are without updates that began ahead of the step
  kWriteValues,   // values or step counts, which such updates have used
  kGiveUpValues,  // values belong to somebody else from now on
  kChangeChunks,  // what is trained, or kept on the device
  kGradients,     // gradients, from backward to step
  kBeginForward,
  kEndForward,
  kUndoForward,
  kUse,
  kBeginBackward,
  kFold,
  kEndBackward,
  kAbort,  // an exception left a forward or a backward
  kPrepareStep,
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

  const std::vector<ParamId>* params = nullptr;  // their chunks; null: not given so
  ChunkId chunk = -1;                            // -1: not given so
};

// Throws StateError where the rule refuses the call; nothing is changed then.
void begin_call(OpenEngine& open, Call call, const CallChunks& chunks);

}  // namespace patrickstar
