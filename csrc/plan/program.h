// The program of a step: a plan and its recipes as instructions, in the order in which they are issued. It decides
// which arrays are on the device; the seconds of an instruction are the Clock's (plan/clock.h).
//
//   const Program program = compile(problem, plan, shape);   // of the steady step
//   for (const Instruction& instruction : program.instructions) {
//     const OpRow& row = row_of(instruction.op);             // name, operand, lane
//   }
//
// Pure functions of sizes.
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
