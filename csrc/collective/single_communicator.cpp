// The group of one rank, for host memory.
#include <cstring>

#include "collective/communicator.h"

namespace patrickstar {

namespace {

class SingleCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void all_gather(void*, int64_t) override {}
  void reduce_scatter_mean(void* whole, void* shard, void*, int64_t shard_numel, DType dtype) override {
    if (shard != whole) std::memmove(shard, whole, static_cast<size_t>(shard_numel * element_size(dtype)));
  }
  void exchange(const std::vector<PeerBytes>& sends, const std::vector<PeerBytes>& receives) override {
    check_exchange(*this, sends, receives);
  }
  void abort() override {}
  void check() override {}
  double oldest_pending_seconds() override { return 0.0; }
  void close() override {}
};

class SingleControl final : public ControlGroup {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void enter(const std::string& call) override { call_ = call; }
  std::string call() const override { return call_; }
  std::vector<std::string> exchange(const std::string&, const std::string& mine) override { return {mine}; }
  std::vector<std::string> distribute(const std::string&, const std::vector<std::string>& to_each) override {
    return to_each;
  }
  void abort() override {}
  void close() override {}

 private:
  std::string call_;
};

}  // namespace

std::unique_ptr<Communicator> make_single_communicator() { return std::make_unique<SingleCommunicator>(); }
std::unique_ptr<ControlGroup> make_single_control() { return std::make_unique<SingleControl>(); }

}  // namespace patrickstar
