// Groups of torch.distributed on the CPU. Python's groups are reached by name, because a pybind11 type of PyTorch
// cannot cross into an extension made with nanobind.
#include "torch_shim/parts.h"

#ifdef PATRICKSTAR_WITH_C10D

#include <ATen/ops/from_blob.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

namespace patrickstar::shim {

namespace {

class Message final : public TorchMessage {
 public:
  explicit Message(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
  bool wait(int64_t milliseconds) override { return work_->wait(std::chrono::milliseconds(milliseconds)); }
  void abort() override { work_->abort(); }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
};

std::vector<at::Tensor> bytes_at(void* data, int64_t num_bytes) {
  return {at::from_blob(data, {num_bytes}, at::kByte)};
}

class Group final : public TorchGroup {
 public:
  explicit Group(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {}
  int rank() const override { return backend_->getRank(); }
  int size() const override { return backend_->getSize(); }
  TorchMessage* send(void* data, int64_t num_bytes, int peer, int tag) override {
    std::vector<at::Tensor> bytes = bytes_at(data, num_bytes);
    return new Message(backend_->send(bytes, peer, tag));
  }
  TorchMessage* receive(void* data, int64_t num_bytes, int peer, int tag) override {
    std::vector<at::Tensor> bytes = bytes_at(data, num_bytes);
    return new Message(backend_->recv(bytes, peer, tag));
  }

 private:
  c10::intrusive_ptr<c10d::Backend> backend_;
};

}  // namespace

TorchGroup* open_group(const char* name) {
  return new Group(c10d::resolve_process_group(name)->getBackend(c10::DeviceType::CPU));
}

}  // namespace patrickstar::shim

#else

namespace patrickstar::shim {

TorchGroup* open_group(const char*) { return nullptr; }

}  // namespace patrickstar::shim

#endif
