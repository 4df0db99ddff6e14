#include "plan/program.h"

#include <algorithm>
#include <utility>

namespace patrickstar {

namespace {

int param_of(ChunkId chunk) { return ArrayId{chunk, ArrayKind::kParam}.index(); }
int grad_of(ChunkId chunk) { return ArrayId{chunk, ArrayKind::kGrad}.index(); }

class Compiler {
 public:
  Compiler(const PlanProblem& problem, const Plan& plan, const StepShape& shape);

  // One step, starting with the arrays that the previous one left on the device.
  const Program& step();

 private:
  struct ArrayState {
    bool on_device = false;
    bool is_ahead = false;  // prefetched, not yet needed
    bool has_left = false;  // evicted gradient that must return for its update
    size_t last_use = 0;    // last access that reads or writes it
  };

  void emit(Op op, int operand, Issue issue = Issue::kNow) { program_.instructions.push_back({op, issue, operand}); }
  void carry_out(const Emitted& emitted);
  void emit_access(size_t access);
  void emit_uses(size_t access);
  void emit_need(int array);
  void emit_bring(int array, Issue issue);
  void emit_evict(int array);
  void emit_finalisations(size_t access);
  void emit_finalise(ChunkId chunk, size_t access);
  void emit_end();
  void emit_device_update(ChunkId chunk);
  void emit_room_for(int array);
  void allocate(int array, Issue issue = Issue::kNow);
  void free(int array);

  ArrayState& state(int array) { return arrays_[static_cast<size_t>(array)]; }
  const ArrayCost& cost(int array) const { return problem_.arrays[static_cast<size_t>(array)]; }
  const RecipeRow& recipe(ChunkId chunk) const { return row_of(shape_.updates[static_cast<size_t>(chunk)]); }

  const PlanProblem& problem_;
  const Plan& plan_;
  const StepShape& shape_;
  std::vector<ArrayState> arrays_;
  int64_t used_bytes_ = 0;
  Program program_;
};

Compiler::Compiler(const PlanProblem& problem, const Plan& plan, const StepShape& shape)
    : problem_(problem), plan_(plan), shape_(shape), arrays_(problem.arrays.size()) {
  for (size_t t = 0; t < problem.timeline->accesses.size(); ++t) {
    for (const ArrayUse& use : problem.timeline->accesses[t].uses) {
      if (use.mode != ArrayUseMode::kFinalise) state(use.array.index()).last_use = t;
    }
  }
}

const Program& Compiler::step() {
  const size_t num_before = program_.instructions.size();
  program_ = {};
  program_.instructions.reserve(num_before);
  for (int array = 0; array < static_cast<int>(arrays_.size()); ++array) {
    if (state(array).on_device) program_.resident.push_back(array);
  }
  for (size_t t = 0; t < plan_.accesses.size(); ++t) emit_access(t);
  emit_end();
  return program_;
}

// The order of Pager::begin_access, compute, GradientFlow::finalise.
void Compiler::emit_access(size_t t) {
  const AccessPlan& planned = plan_.accesses[t];
  const auto access = static_cast<int>(t);
  emit(Op::kBegin, access);
  for (ArrayId id : planned.evict) emit_evict(id.index());
  for (const ArrayUse& use : problem_.timeline->accesses[t].uses) {
    if (use.mode == ArrayUseMode::kRead) emit_need(use.array.index());
  }
  for (ArrayId id : planned.evict_ahead) emit_evict(id.index());
  for (ArrayId id : planned.prefetch) {
    if (!state(id.index()).on_device) emit_bring(id.index(), Issue::kAhead);
  }
  const ActivationCopies copies = shape_.activations.empty() ? ActivationCopies{} : shape_.activations[t];
  if (copies.coming_bytes > 0 || copies.needed_bytes > 0) emit(Op::kRecall, access);
  emit_uses(t);
  emit(Op::kCompute, access);
  if (copies.leaving_bytes > 0) emit(Op::kOffload, access);
  emit_finalisations(t);
}

// Memory for arrays that the access writes; evicted partial gradients are fetched.
void Compiler::emit_uses(size_t t) {
  const std::vector<ArrayId>& fetched = plan_.accesses[t].fetch;
  for (const ArrayUse& use : problem_.timeline->accesses[t].uses) {
    const int array = use.array.index();
    if (use.mode != ArrayUseMode::kWrite || state(array).on_device) continue;
    if (std::find(fetched.begin(), fetched.end(), use.array) != fetched.end()) {
      emit_bring(array, Issue::kNow);
    } else {
      allocate(array);
    }
  }
}

void Compiler::emit_need(int array) {
  if (!state(array).on_device) return emit_bring(array, Issue::kNow);
  if (std::exchange(state(array).is_ahead, false)) emit(Op::kAwait, array);
}

// A value without bytes of its own is part of states on the device.
void Compiler::emit_bring(int array, Issue issue) {
  if (cost(array).num_bytes == 0 && cost(array).fetch_bytes == 0) return;
  const ArrayId id = ArrayId::from_index(array);
  const bool is_whole = id.kind == ArrayKind::kParam && shape_.is_sharded(id.chunk);
  const bool is_made_there = !is_whole && dequantized_bytes(shape_, array) > 0;
  const Origin on_device = is_made_there ? Origin::kCodes : Origin::kDevice;
  const Origin origin = cost(array).fetch_bytes > 0 ? Origin::kHost : on_device;
  carry_out(arrival(array, origin, is_whole ? Sharing::kShared : Sharing::kOwn, issue));
}

void Compiler::emit_evict(int array) {
  if (!state(array).on_device) return;
  state(array).has_left = true;
  carry_out(departure(array, cost(array).evict_bytes > 0 ? Copy::kOnly : Copy::kElsewhere));
}

void Compiler::carry_out(const Emitted& emitted) {
  for (const Instruction& instruction : emitted) {
    switch (instruction.op) {
      case Op::kAllocate:
        allocate(instruction.operand, instruction.issue);
        break;
      case Op::kFree:
        free(instruction.operand);
        break;
      case Op::kUpdateDevice:
        emit_device_update(instruction.operand);
        break;
      default:
        program_.instructions.push_back(instruction);
    }
  }
}

// A gradient whose update runs in backward on the device stays there, so the timeline need not finalise it.
void Compiler::emit_finalisations(size_t t) {
  std::vector<ChunkId> stay;
  for (const ArrayUse& use : problem_.timeline->accesses[t].uses) {
    const ChunkId chunk = use.array.chunk;
    if (use.mode == ArrayUseMode::kFinalise) emit_finalise(chunk, t);
    const RecipeRow& row = recipe(chunk);
    if (row.start != Start::kCommitted || row.states != Tier::kDevice || shape_.is_sharded(chunk)) continue;
    const bool is_complete = use.mode == ArrayUseMode::kWrite && state(use.array.index()).last_use == t;
    if (is_complete && state(param_of(chunk)).last_use <= t) stay.push_back(chunk);
  }
  std::sort(stay.begin(), stay.end());  // release order of a module's parameters
  for (ChunkId chunk : stay) emit_finalise(chunk, t);
}

void Compiler::emit_finalise(ChunkId chunk, size_t access) {
  const int grad = grad_of(chunk);
  const int param = param_of(chunk);
  Finalisation finalised;
  finalised.chunk = chunk;
  finalised.update = shape_.updates[static_cast<size_t>(chunk)];
  finalised.sharing = shape_.is_sharded(chunk) ? Sharing::kShared : Sharing::kOwn;
  finalised.value_is_dead = state(param).on_device && state(param).last_use <= access;
  finalised.value_is_taken =
      is_round_trip(recipe(chunk)) && problem_.round_trips[static_cast<size_t>(chunk)].value_bytes > 0;
  finalised.leaves = cost(grad).finalise_bytes > 0;
  if (state(grad).on_device) return carry_out(finalisation(finalised));
  if (finalised.value_is_dead) free(param);
}

// Values updated on the host are no longer on the device.
void Compiler::emit_end() {
  const auto num_chunks = static_cast<ChunkId>(shape_.updates.size());
  emit(Op::kNorm, 0);
  // All downloads start before the first update waits for one.
  for (ChunkId chunk = 0; chunk < num_chunks; ++chunk) {
    const int grad = grad_of(chunk);
    const RecipeRow& row = recipe(chunk);
    if (row.start != Start::kAfterNorm || row.states == Tier::kDevice || !state(grad).on_device) continue;
    emit(Op::kToHost, grad);
    free(grad);
  }
  for (ChunkId chunk = 0; chunk < num_chunks; ++chunk) {
    carry_out(deferred_update(chunk, shape_.updates[static_cast<size_t>(chunk)]));
  }
  // Phase two of two-phase updates, in the order of the next backward.
  for (ChunkId chunk = num_chunks - 1; chunk >= 0; --chunk) {
    if (recipe(chunk).passes == Passes::kTwo) emit(Op::kUpdateHostStates, chunk);
  }
  for (int array = 0; array < static_cast<int>(arrays_.size()); ++array) {
    if (state(array).on_device && !cost(array).survives_step) free(array);
  }
}

// The new parameter takes the gradient's place, unless it has its own, or the gradient came back only for the update.
void Compiler::emit_device_update(ChunkId chunk) {
  const int grad = grad_of(chunk);
  const int param = param_of(chunk);
  const bool comes_back = std::exchange(state(grad).has_left, false) && !state(grad).on_device;
  if (comes_back) {
    emit_room_for(grad);
    emit_bring(grad, Issue::kNow);
  }
  emit(Op::kUpdateDevice, chunk);
  if (state(param).on_device) free(param);
  if (comes_back || (state(grad).on_device && cost(param).num_bytes == 0)) {
    free(grad);
  } else if (state(grad).on_device) {
    emit(Op::kInherit, param);
    state(grad).on_device = false;
    state(param).on_device = true;
    state(param).is_ahead = false;
    used_bytes_ += cost(param).num_bytes - cost(grad).num_bytes;
  }
}

// Frees room between two steps, beside activation memory. Values that the next step needs last leave first.
void Compiler::emit_room_for(int array) {
  if (problem_.limit_bytes == INT64_MAX) return;
  const int64_t most = problem_.limit_bytes - problem_.fixed_bytes -
                       activation_memory(problem_, plan_.accesses.size() - 1) - cost(array).num_bytes;
  for (auto chunk = static_cast<ChunkId>(shape_.updates.size()); chunk-- > 0 && used_bytes_ > most;) {
    const bool is_copy = recipe(chunk).states != Tier::kDevice;
    if (is_copy && state(param_of(chunk)).on_device) free(param_of(chunk));
  }
}

void Compiler::allocate(int array, Issue issue) {
  emit(Op::kAllocate, array, issue);
  state(array).on_device = true;
  state(array).is_ahead = issue == Issue::kAhead;
  used_bytes_ += cost(array).num_bytes;
}

void Compiler::free(int array) {
  if (!state(array).on_device) return;
  emit(Op::kFree, array);
  state(array).on_device = false;
  state(array).is_ahead = false;
  used_bytes_ -= cost(array).num_bytes;
}

}  // namespace

Program compile(const PlanProblem& problem, const Plan& plan, const StepShape& shape) {
  Compiler compiler(problem, plan, shape);
  compiler.step();  // reaches the state that every later step starts with
  return compiler.step();
}

int64_t amount_of(const Instruction& instruction, const PlanProblem& problem, const StepShape& shape) {
  const auto index = static_cast<size_t>(instruction.operand);
  switch (row_of(instruction.op).amount) {
    case Amount::kNone:
      return 0;
    case Amount::kFetched:
      return problem.arrays[index].fetch_bytes;
    case Amount::kEvicted:
      return problem.arrays[index].evict_bytes;
    case Amount::kFinalised:
      return problem.arrays[index].finalise_bytes;
    case Amount::kMemory:
      return problem.arrays[index].num_bytes;
    case Amount::kOthers:
      return others_bytes(problem.arrays[index], shape.ranks_of(instruction.chunk()));
    case Amount::kRead:
      return dequantized_bytes(shape, instruction.operand);
    case Amount::kComing:
      return shape.activations[index].coming_bytes;
    case Amount::kLeaving:
      return shape.activations[index].leaving_bytes;
    case Amount::kParams:
      return shape.numels[index];
    case Amount::kDisk:
      return shape.disk_bytes[index];
    case Amount::kRoundTripUp:
      return problem.round_trips[index].up_bytes;
    case Amount::kRoundTripDown:
      return problem.round_trips[index].down_bytes;
  }
  return 0;
}

int64_t activation_memory(const PlanProblem& problem, size_t access) {
  return std::max(problem.timeline->accesses[access].activation_peak_bytes, problem.least_activation_bytes);
}

int64_t others_bytes(const ArrayCost& cost, int num_ranks) { return cost.num_bytes / num_ranks * (num_ranks - 1); }

int64_t dequantized_bytes(const StepShape& shape, int array) {
  const ArrayId id = ArrayId::from_index(array);
  if (id.kind != ArrayKind::kParam || shape.dequantized_bytes.empty()) return 0;
  return shape.dequantized_bytes[static_cast<size_t>(id.chunk)];
}

}  // namespace patrickstar
