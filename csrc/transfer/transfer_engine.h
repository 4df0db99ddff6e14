// Moves payloads between their host block and their device slot, in order and without host synchronisation.
//
//   upload(array)     block -> slot, on the upload queue
//   download(array)   slot -> block, on the download queue, after the compute queue's present work
//
// Both blocks must exist. The engine keeps the records' events so that whoever reads next can wait. [Note:
// reuse of memory] A slot's `busy_until` is complete when nothing reads or writes its old content any more; a
// block may be freed only after await_on_host. Guarded by the runtime's lock.
#pragma once

#include <cstdint>

#include "backend/backend.h"
#include "chunk/chunk_store.h"

namespace patrickstar {

struct TransferCounters {
  int64_t uploaded_bytes = 0;
  int64_t downloaded_bytes = 0;
};

class TransferEngine {
 public:
  TransferEngine(Backend& backend, ChunkStore& store) : backend_(backend), store_(store) {}

  void upload(ArrayId id);
  void download(ArrayId id);

  // Later work of the compute queue sees the array's value in its slot.
  void await_on_device(ArrayId id);
  // Returns when the array's block can be read, written and freed by this thread.
  void await_on_host(ArrayId id);

  // An event after which the slot's present content is no longer needed: all compute enqueued so far, and a
  // transfer under way. To be stored in the slot when it is released.
  void mark_busy(ArrayId id);

  TransferCounters& counters() { return counters_; }

 private:
  Backend& backend_;
  ChunkStore& store_;
  TransferCounters counters_;
};

}  // namespace patrickstar
