// Interrupts at safe points. A signal that arrives during the user's forward or backward is delivered by the next hook
// of ours on the main thread (engine/interrupts.py), where PyTorch is not in the middle of an operation. Called with
// the GIL.
#pragma once

#include <pybind11/pybind11.h>

namespace patrickstar::bind {

// Calls the function of set_interrupt_delivery() if an interrupt is waiting. May raise.
void deliver_interrupt();

void register_interrupts(pybind11::module_& module);

}  // namespace patrickstar::bind
