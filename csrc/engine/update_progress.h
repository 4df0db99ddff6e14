// Which chunks' updates of the step are made for good: by the step itself, or in backward ([Note: committed updates],
// engine/updates.h).
//
//   progress.begin(chunk);    // from here on it cannot be undone
//   ... launch its update ...
//   progress.finish(chunk);   // made, or on its way to be
//   progress.forget();        // the step is over
//
// [Note: all or nothing] What an update needs (memory, places, tasks) is there before it begins, and what follows it
// does not throw. So when a step fails, each chunk is updated or as it was, and applying the step again finishes it.
// Where a launch itself fails its chunk is torn, and only a checkpoint helps. Guarded by the engine's lock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/types.h"

namespace patrickstar {

class UpdateProgress {
 public:
  explicit UpdateProgress(int num_chunks) : stages_(static_cast<size_t>(num_chunks), Stage::kToCome) {}

  void begin(ChunkId chunk) { stages_[static_cast<size_t>(chunk)] = Stage::kBegun; }
  void finish(ChunkId chunk) {
    num_made_ += is_made(chunk) ? 0 : 1;
    stages_[static_cast<size_t>(chunk)] = Stage::kMade;
  }
  void forget() {
    std::fill(stages_.begin(), stages_.end(), Stage::kToCome);
    num_made_ = 0;
  }

  bool is_made(ChunkId chunk) const { return stages_[static_cast<size_t>(chunk)] == Stage::kMade; }
  int num_made() const { return num_made_; }
  // An update has begun and not been made.
  bool is_torn() const { return std::find(stages_.begin(), stages_.end(), Stage::kBegun) != stages_.end(); }

 private:
  enum class Stage : uint8_t { kToCome, kBegun, kMade };

  std::vector<Stage> stages_;  // by chunk
  int num_made_ = 0;
};

}  // namespace patrickstar
