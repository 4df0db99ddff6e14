// The program of a step: a plan and its recipes as instructions, in the order in which they are issued. It decides
// which arrays are on the device; the seconds of an instruction are the Clock's (plan/clock.h).
//
//   const Program program = compile(problem, plan, shape);   // of the steady step
//   for (const Instruction& instruction : program.instructions) {
//     const OpRow& row = row_of(instruction.op);             // name, operand, lane
//   }
//
// A new mechanism is a row of kOps, a line where it is emitted, and a time of the Clock. Pure functions of sizes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan/planner.h"
#include "plan/recipe.h"
#include "plan/step_shape.h"

namespace patrickstar {

enum class Op : uint8_t {
  kBegin,
  kRecall,
  kCompute,
  kOffload,
  kAllocate,
  kFetch,
  kCast,
  kDequantize,
  kGather,
  kAwait,
  kEvict,
  kScatter,
  kAwaitRoom,
  kToHost,
  kInherit,
  kFree,
  kNorm,
  kUpdateHost,
  kUpdateHostParam,
  kUpdateHostStates,
  kUpdateDevice,
  kLoad,
  kUpdateDisk,
  kStore,
  kVisitUp,
  kVisitDown,
};
constexpr size_t kNumOps = 26;

enum class Operand : uint8_t { kMoment, kArray, kChunk, kNone };

// The queue or worker that is busy with an instruction.
enum class Lane : uint8_t {
  kLaunch,  // the launching thread, which takes no time for it
  kCompute,
  kUpload,
  kDownload,
  kGather,
  kScatter,
  kHost,
  kDiskRead,
  kDiskHost,  // the worker that updates chunks whose states are on the disk
  kDiskWrite,
  kVisit,
};

struct OpRow {
  const char* name;
  Operand operand;
  Lane lane;
};

constexpr std::array<OpRow, kNumOps> kOps{{
    {"begin", Operand::kMoment, Lane::kLaunch},
    {"recall", Operand::kMoment, Lane::kUpload},  // activations that come back
    {"compute", Operand::kMoment, Lane::kCompute},
    {"offload", Operand::kMoment, Lane::kDownload},  // activations that leave
    {"allocate", Operand::kArray, Lane::kLaunch},    // device memory; a value of a master there is made in no time
    {"fetch", Operand::kArray, Lane::kUpload},
    {"cast", Operand::kArray, Lane::kCompute},  // this rank's shard, of what is on the device
    {"dequantize", Operand::kArray, Lane::kCompute},
    {"gather", Operand::kArray, Lane::kGather},
    {"await", Operand::kArray, Lane::kLaunch},  // a value that was fetched ahead is needed
    {"evict", Operand::kArray, Lane::kDownload},
    {"scatter", Operand::kArray, Lane::kScatter},
    {"await_room", Operand::kArray, Lane::kLaunch},  // host memory for a gradient
    {"to_host", Operand::kArray, Lane::kDownload},   // a gradient, to where its update is
    {"inherit", Operand::kArray, Lane::kLaunch},     // the new parameter takes its gradient's memory
    {"free", Operand::kArray, Lane::kLaunch},
    {"norm", Operand::kNone, Lane::kCompute},
    {"update_host", Operand::kChunk, Lane::kHost},
    {"update_host_param", Operand::kChunk, Lane::kHost},   // [Note: parameters first], engine/update_jobs.h
    {"update_host_states", Operand::kChunk, Lane::kHost},  // behind it
    {"update_device", Operand::kChunk, Lane::kCompute},
    {"load", Operand::kChunk, Lane::kDiskRead},
    {"update_disk", Operand::kChunk, Lane::kDiskHost},
    {"store", Operand::kChunk, Lane::kDiskWrite},
    {"visit_up", Operand::kChunk, Lane::kVisit},  // states go up, and the device updates them
    {"visit_down", Operand::kChunk, Lane::kVisit},
}};
constexpr const OpRow& row_of(Op op) { return kOps[static_cast<size_t>(op)]; }

enum class Issue : uint8_t {
  kNow,
  kAhead,  // when its inputs are there: a fetch ahead of its use, an update ahead of the norm
};

struct Instruction {
  Op op = Op::kBegin;
  Issue issue = Issue::kNow;
  int32_t operand = 0;  // index of a moment, array (ArrayId::index) or chunk

  ChunkId chunk() const;  // of an array or a chunk; -1: of neither
};

struct Program {
  std::vector<Instruction> instructions;
  std::vector<int> resident;  // arrays on the device when the step begins
};

// The steady step of `plan`. Sizes must agree (simulate() checks them).
Program compile(const PlanProblem& problem, const Plan& plan, const StepShape& shape);

// Bytes that it moves, allocates or frees; parameters that it updates; 0 of others.
int64_t amount_of(const Instruction& instruction, const PlanProblem& problem, const StepShape& shape);

// Activations at a moment, as a plan counts them.
int64_t tide(const PlanProblem& problem, size_t moment);
// Bytes of a gathered or scattered array that come from the other ranks or go to them.
int64_t others_bytes(const ArrayCost& cost, int num_ranks);
// The value is made of codes on the device; 0: it is not.
int64_t dequantized_bytes(const StepShape& shape, int array);

}  // namespace patrickstar
