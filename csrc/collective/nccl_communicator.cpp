#include <nccl.h>

#include <cstring>

#include "collective/communicator.h"
#include "common/check.h"

namespace patrickstar {

namespace {

void check(ncclResult_t result, const char* call) {
  PS_CHECK(result == ncclSuccess, SystemError, call, " failed: ", ncclGetErrorString(result));
}

ncclDataType_t native(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return ncclBfloat16;
    case DType::kFloat16:
      return ncclFloat16;
    case DType::kFloat32:
      break;
  }
  return ncclFloat32;
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(const ncclUniqueId& id, int rank, int size) : rank_(rank), size_(size) {
    check(ncclCommInitRank(&comm_, size, id, rank), "ncclCommInitRank");
  }
  ~NcclCommunicator() override { ncclCommDestroy(comm_); }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void all_gather(const void* shard, void* whole, int64_t shard_numel, DType dtype, cudaStream_t stream) override {
    check(ncclAllGather(shard, whole, static_cast<size_t>(shard_numel), native(dtype), comm_, stream), "ncclAllGather");
  }
  void reduce_scatter(const void* whole, void* shard, int64_t shard_numel, DType dtype, cudaStream_t stream) override {
    check(ncclReduceScatter(whole, shard, static_cast<size_t>(shard_numel), native(dtype), ncclSum, comm_, stream),
          "ncclReduceScatter");
  }

 private:
  ncclComm_t comm_ = nullptr;
  int rank_;
  int size_;
};

}  // namespace

std::string make_nccl_id() {
  ncclUniqueId id;
  check(ncclGetUniqueId(&id), "ncclGetUniqueId");
  return {id.internal, sizeof(id.internal)};
}

std::string nccl_version() {
  int version = 0;
  check(ncclGetVersion(&version), "ncclGetVersion");
  return detail::join(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

std::unique_ptr<Communicator> make_nccl_communicator(const std::string& id, int rank, int size, int device) {
  ncclUniqueId unique_id;
  PS_CHECK(id.size() == sizeof(unique_id.internal), ArgumentError, "an NCCL id has ", sizeof(unique_id.internal),
           " bytes, got ", id.size(), "; pass what make_nccl_id() returned");
  std::memcpy(unique_id.internal, id.data(), id.size());
  const cudaError_t error = cudaSetDevice(device);
  PS_CHECK(error == cudaSuccess, SystemError, "cudaSetDevice(", device, ") failed: ", cudaGetErrorString(error));
  return std::make_unique<NcclCommunicator>(unique_id, rank, size);
}

}  // namespace patrickstar
