// What activations have left in PyTorch's allocator, for what is gone before they come again.
//
// [Note: regions of the tide] ([Note: gradients in the tide], memory/tide_memory.h) Much of what is cached for the
// compute queue is in pieces that the next layer's recomputation takes again; for what is cut out of those, PyTorch
// maps new pages then (all gradients of GPT 18.5 B so raised its tide from 12.7 GB to 22.8). So memory is taken as
// regions out of the largest free block, of which a part stays, and no more of them when PyTorch has reserved more for
// the queue than when the first one was taken. By as much as that has grown from one step to the next, they may take
// less from then on: else regions would grow with what they make layers map. A region goes back when nothing in it is
// in use, all of them at the step's end.
#pragma once

#include <cstdint>
#include <vector>

namespace patrickstar {

class CudaTideRegions {
 public:
  // `kept_bytes` of each block out of which a region is cut stay, or a quarter of it if that is more.
  CudaTideRegions(int device, int64_t kept_bytes) : device_(device), kept_bytes_(kept_bytes) {}
  CudaTideRegions(const CudaTideRegions&) = delete;
  CudaTideRegions& operator=(const CudaTideRegions&) = delete;

  // Memory of the compute stream `stream`; null where there is no room.
  void* allocate(int64_t num_bytes, void* stream);
  // Nothing but later work of that stream uses the memory. Throws what PyTorch's allocator throws.
  void free(void* pointer);

  // Of all regions; and the least since the last call.
  int64_t num_bytes() const { return taken_bytes_; }
  int64_t take_least_bytes();

 private:
  struct Region {
    char* begin;
    int64_t num_bytes;
    int64_t used;  // from the first byte on; what is freed in between comes back with the region
    int num_in_use;
  };

  // What PyTorch has for a stream, in blocks of more than 1 MiB.
  struct Pages {
    int64_t reserved = 0;
    int64_t largest_free = 0;  // block
  };

  // False: there is none that has room for so much.
  bool add_region(int64_t num_bytes, void* stream);
  Pages pages_of(void* stream) const;
  // A step's first region is asked for.
  void note_growth(int64_t reserved);

  int device_;
  int64_t kept_bytes_;
  std::vector<Region> regions_;
  int64_t taken_bytes_ = 0;       // by regions
  int64_t least_bytes_ = 0;       // since take_least_bytes()
  bool is_first_of_step_ = true;  // the next region
  int64_t allowed_bytes_ = INT64_MAX;
  int64_t step_bytes_ = 0;      // of all regions since there was none
  int64_t last_reserved_ = 0;   // when the first of them was asked for; 0: none was yet
  int64_t cached_in_vain_ = 0;  // by PyTorch, when the last look in this step found nothing
};

}  // namespace patrickstar
