// Moves payloads between their host block and their device slot, in order and without host synchronisation.
//
//   upload(array)     block -> slot, on the upload queue
//   download(array)   slot -> block, on the download queue, after the compute queue's present work
//
// Both blocks must exist. The engine keeps the records' events so that whoever reads next can wait. [Note:
// reuse of memory] When a slot's `busy` events are complete, nothing reads or writes its old content any more; a
// block may be freed only after settle_block. Guarded by the runtime's lock.
#pragma once

#include <cstdint>

#include "backend/backend.h"
#include "chunk/chunk_store.h"
#include "common/tracing.h"

namespace patrickstar {

struct TransferCounters {
  int64_t uploaded_bytes = 0;
  int64_t downloaded_bytes = 0;
};

class TransferEngine {
 public:
  TransferEngine(Backend& backend, ChunkStore& store, Tracer& tracer)
      : backend_(backend), store_(store), tracer_(tracer) {}

  void upload(ArrayId id);
  void download(ArrayId id);
  // block -> `to`, which lies in a slot of another array. Returns the event after which it is there.
  Event upload_to(ArrayId id, void* to, const Slot& slot);

  // Later work of the compute queue sees the array's value in its slot.
  void await_on_device(ArrayId id);
  // Returns when the array's block has its value, and this thread may read and write it.
  void await_on_host(ArrayId id);
  // Returns when nobody uses the array's block any more, whatever became of its value: it may be freed.
  void settle_block(ArrayId id);

  // Later work of `queue` may write the slot: what still reads or writes its old content is over then.
  void await_slot(Queue queue, const Slot& slot);
  // To be called before the slot is released: all compute enqueued so far may use its content. A transfer under way is
  // known to the slot already, and the compute queue does not wait for it.
  void mark_busy(ArrayId id);

  TransferCounters& counters() { return counters_; }

 private:
  // Returns when `event` is complete.
  void await(const Event& event, StallCause cause, ArrayId id);

  Backend& backend_;
  ChunkStore& store_;
  Tracer& tracer_;
  TransferCounters counters_;
};

}  // namespace patrickstar
