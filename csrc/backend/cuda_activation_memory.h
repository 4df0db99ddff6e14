// Sub-allocates gradients from free blocks that activations left in PyTorch's cache (memory/activation_memory.h).
//
// Most cached memory of the compute queue is in pieces that the next layer's recomputation needs again. Taking a piece
// makes PyTorch map new pages. A region is therefore cut out of the largest free block, and part of that block stays
// free. No region is added once PyTorch has reserved more for the queue than at the step's first region. If that
// reservation grew since the last step, the regions of later steps shrink by the growth. A region returns to PyTorch
// when nothing in it is in use; all of them return by the end of the step.
#pragma once

#include <cstdint>
#include <vector>

namespace patrickstar {

class CudaActivationRegions {
 public:
  // A block keeps `kept_bytes`, or a quarter of its size if that is more, when a region is cut out of it.
  CudaActivationRegions(int device, int64_t kept_bytes) : device_(device), kept_bytes_(kept_bytes) {}
  CudaActivationRegions(const CudaActivationRegions&) = delete;
  CudaActivationRegions& operator=(const CudaActivationRegions&) = delete;

  // Memory of the compute stream `stream`. Null if there is no room.
  void* allocate(int64_t num_bytes, void* stream);
  // Only later work of that stream may still use the memory. Throws what PyTorch's allocator throws.
  void free(void* pointer);

  // Bytes of all regions: now, and the least since the last call.
  int64_t num_bytes() const { return taken_bytes_; }
  int64_t take_least_bytes();

 private:
  struct Region {
    char* begin;
    int64_t num_bytes;
    int64_t used;  // bytes from the begin on; freed pieces return with the region
    int num_in_use;
  };

  // False if no free block is large enough.
  bool add_region(int64_t num_bytes, void* stream);
  // Called for a step's first region.
  void note_growth(int64_t reserved);

  int device_;
  int64_t kept_bytes_;
  std::vector<Region> regions_;
  int64_t taken_bytes_ = 0;       // by regions
  int64_t least_bytes_ = 0;       // since take_least_bytes()
  bool is_first_of_step_ = true;  // the next region is the step's first
  int64_t allowed_bytes_ = INT64_MAX;
  int64_t step_bytes_ = 0;      // bytes of the regions added in this step
  int64_t last_reserved_ = 0;   // at the first region of the last step; 0: no step so far
  int64_t cached_in_vain_ = 0;  // PyTorch's cached bytes when the last search of this step failed
};

}  // namespace patrickstar
