// Interrupts at safe points. A signal may arrive during the user's forward or backward. The next hook of ours on the
// main thread delivers it (session/interrupts.py), where PyTorch is not in the middle of an operation. Called with the
// GIL.
#pragma once

#include <nanobind/nanobind.h>

namespace patrickstar::bind {

// Calls the function of set_interrupt_delivery() if an interrupt is waiting. May raise.
void deliver_interrupt();

void register_interrupts(nanobind::module_& module);

}  // namespace patrickstar::bind
