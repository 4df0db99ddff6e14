#include "chunk/param_storage.h"

#include <utility>

#include "common/check.h"

namespace patrickstar {

namespace {

// StorageImpl can be made to refuse access with a message (PyTorch uses it for fake tensors), but before 2.13
// nothing public takes the refusal back. An explicit instantiation may name a private member, so this reaches
// the flag in every version since 2.6 without a change to PyTorch.
bool& refuses_access(c10::StorageImpl& storage);

template <bool c10::StorageImpl::* Member>
struct FlagAccess {
  friend bool& refuses_access(c10::StorageImpl& storage) { return storage.*Member; }
};
template struct FlagAccess<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

// Stands for "not resizable, not ours to free": slots belong to the slot pool.
c10::DataPtr borrowed(void* data, c10::Device device) { return {data, device}; }

}  // namespace

ParamStorage::ParamStorage(c10::StorageImpl* storage, int64_t num_bytes, const std::string& absent_message)
    : storage_(c10::intrusive_ptr<c10::StorageImpl>::unsafe_reclaim_from_nonowning(storage)) {
  storage_->set_nbytes(num_bytes);
  storage_->release_data_and_set_meta_custom_data_ptr_error_msg_(absent_message);
  attach(nullptr);
}

void ParamStorage::attach(void* data) {
  refuses_access(*storage_) = false;
  storage_->set_data_ptr_noswap(borrowed(data, storage_->device()));
}

void ParamStorage::detach() {
  const c10::Device device = storage_->device();
  refuses_access(*storage_) = true;
  storage_->set_data_ptr_noswap(borrowed(nullptr, device));  // also refreshes the check of mutable access
}

void ParamStorage::adopt(c10::DataPtr data) {
  refuses_access(*storage_) = false;
  storage_->set_data_ptr_noswap(std::move(data));
}

}  // namespace patrickstar
