#include "bind/bind.h"
#include "bind/interrupts.h"

NB_MODULE(_C, module) {
  namespace bind = patrickstar::bind;
  module.doc() = "The core of PatrickStar: chunks, transfers, planner, hybrid Adam, loss scaling.";
  nanobind::set_leak_warnings(false);  // an engine that is open when Python ends is no mistake
  bind::register_build(module);
  bind::register_errors(module);
  bind::register_types(module);
  bind::register_threads(module);
  bind::register_checksum(module);
  bind::register_optim(module);
  bind::register_quant(module);
  bind::register_experts(module);
  bind::register_fp8(module);
  bind::register_plan(module);
  bind::register_simulator(module);
  bind::register_plan_vote(module);
  bind::register_messages(module);
  bind::register_collective(module);
  bind::register_memory(module);
  bind::register_disk(module);
  bind::register_trace(module);
  bind::register_observer(module);
  bind::register_engine_options(module);
  bind::register_runtime(module);
  bind::register_gradient_hook(module);
  bind::register_interrupts(module);
}
