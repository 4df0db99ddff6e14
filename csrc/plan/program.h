// Compiles a plan and its recipes into the instructions of a step, in issue order. The program decides which arrays are
// on the device; the Clock (plan/clock.h) adds times. Pure functions of sizes.
//
//   const Program program = compile(problem, plan, shape);   // of the steady step
//   for (const Instruction& instruction : program.instructions) {
//     const OpRow& row = row_of(instruction.op);             // name, operand, lane
//   }
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan/ops.h"
#include "plan/planner.h"
#include "plan/step_shape.h"

namespace patrickstar {

struct Program {
  std::vector<Instruction> instructions;
  std::vector<int> resident;  // on the device when the step begins
};

// Sizes must agree (simulate() checks them).
Program compile(const PlanProblem& problem, const Plan& plan, const StepShape& shape);

// OpRow::amount, in bytes or parameters.
int64_t amount_of(const Instruction& instruction, const PlanProblem& problem, const StepShape& shape);

// Activation memory of an access, as plans count it.
int64_t activation_memory(const PlanProblem& problem, size_t access);
// Bytes that an all-gather receives, or a reduce-scatter sends.
int64_t others_bytes(const ArrayCost& cost, int num_ranks);
// Bytes that dequantisation reads and writes; 0 for values that are not made of codes.
int64_t dequantized_bytes(const StepShape& shape, int array);

}  // namespace patrickstar
