#include "engine/value_rows.h"

#include "common/check.h"

namespace patrickstar {

bool ValueRows::are_on_host(ParamId param) const {
  const ArrayId id{memory_.layout().placement(param).chunk, ArrayKind::kParam};
  const ChunkSpec& spec = memory_.store().chunk(id.chunk);
  if (spec.is_sharded() || spec.is_quantized() || (memory_.has_format() && spec.trainable)) return false;
  const ArrayRecord& value = memory_.array(id);
  if (value.on_device || value.on_host) return !value.on_device;
  const ArrayRecord& master = memory_.array({id.chunk, ArrayKind::kMaster});
  return spec.rows.param().source == Source::kMaster && master.on_host && !master.on_device;
}

void ValueRows::copy(ParamId param, const std::vector<int64_t>& rows, int64_t row_numel, void* to) {
  const Placement& placement = memory_.layout().placement(param);
  const ArrayId id{placement.chunk, ArrayKind::kParam};
  const int64_t size = element_size(memory_.layout().chunk(id.chunk).dtype);
  const int64_t num_rows = memory_.layout().param(param).numel / row_numel;
  std::vector<ChunkMemory::Piece> pieces;
  for (int64_t row : rows) {
    PS_CHECK(row >= 0 && row < num_rows, ArgumentError, memory_.store().param_name(param), " has no row ", row, " of ",
             num_rows);
    char* const place = static_cast<char*>(to) + static_cast<int64_t>(pieces.size()) * row_numel * size;
    pieces.push_back({place, (placement.offset + row * row_numel) * size, row_numel * size});
  }
  pager_.bring_to_host(id);
  Backend& backend = memory_.backend();
  backend.wait(Queue::kUpload, backend.record(Queue::kCompute));  // which may still use the memory at `to`
  backend.wait(Queue::kCompute, memory_.upload_pieces(id, pieces));
}

}  // namespace patrickstar
