#include "backend/cuda_delay.h"

namespace patrickstar {

namespace {

__device__ int64_t now_nanoseconds() {
  int64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void delay(int64_t nanoseconds) {
  const int64_t begin = now_nanoseconds();
  while (now_nanoseconds() - begin < nanoseconds) {
  }
}

}  // namespace

cudaError_t launch_delay(int64_t nanoseconds, cudaStream_t stream) {
  delay<<<1, 1, 0, stream>>>(nanoseconds);
  return cudaGetLastError();
}

}  // namespace patrickstar
