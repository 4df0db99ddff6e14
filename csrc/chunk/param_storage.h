// The one c10::StorageImpl that all parameters of a chunk share; the runtime swaps what it points to.
//
// [Note: storage swap] Every `param.data`, and every view autograd saved for backward, shares this storage
// at a fixed offset. Moving a chunk between slots changes one pointer and touches no Python object, and a
// saved view keeps no evicted memory alive. While the chunk is not on the device the storage refuses
// access with a message (a null pointer alone is not enough: several CPU kernels read it unchecked).
//
// The storage object is made by Python (an empty UntypedStorage) and handed over by address; this class
// holds a reference. Guarded by the runtime's lock.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <string>

namespace patrickstar {

class ParamStorage {
 public:
  ParamStorage() = default;
  // `storage` is the address of a live c10::StorageImpl. It becomes `num_bytes` long, without memory; views of it can
  // be made until the first detach(). `absent_message` is what an access while detached raises.
  ParamStorage(c10::StorageImpl* storage, int64_t num_bytes, const std::string& absent_message);

  explicit operator bool() const { return storage_.defined(); }
  void attach(void* data);
  void detach();
  // Gives the storage memory that it owns, for a model that outlives its engine.
  void adopt(c10::DataPtr data);

 private:
  c10::intrusive_ptr<c10::StorageImpl> storage_;
};

}  // namespace patrickstar
