// Interrupts at points that one can name: a signal that comes while the user's forward or backward runs is delivered by
// the next hook of ours that the main thread gets to (engine/interrupts.py), where nothing of PyTorch's is half done.
//
// Called with the GIL.
#pragma once

#include <pybind11/pybind11.h>

namespace patrickstar::bind {

// Calls what set_interrupt_delivery() was given, if an interrupt is waiting; that may raise.
void deliver_interrupt();

void register_interrupts(pybind11::module_& module);

}  // namespace patrickstar::bind
