"""Engines on the simulated device that choose recomputation, by times that do not depend on the machine's load."""

import dataclasses

import torch

from patrickstar import _C
from patrickstar.planning.machines import H200
from patrickstar.session import recompute_choice, step_measurement

ACCESS, RECOMPUTATION, PRODUCTS = 1e-3, 6e-3, 3e-3


def choose_by_fixed_times(setattr=setattr):
    """``setattr``: of a monkeypatch fixture, which undoes it."""
    finish = recompute_choice.CallMeasurement.finish

    def fixed(self, stalls):
        times = {"recompute_seconds": RECOMPUTATION, "product_seconds": PRODUCTS}
        return [dataclasses.replace(call, **times) for call in finish(self, stalls)]

    setattr(recompute_choice, "may_choose", lambda device: True)
    setattr(step_measurement, "_NUMEL", 2**16)
    setattr(step_measurement, "steady_seconds", lambda seconds, calls, numels: [ACCESS] * len(seconds))
    setattr(recompute_choice.CallMeasurement, "finish", fixed)


ALONE, BESIDE_A_STEP = 1e6, 1e-4  # updates on the host, 1e9 parameters per second


def update_slower_beside_steps(setattr=setattr, rate_alone=ALONE):
    """Updates on the host are fast while they are measured alone, and slow once a step was measured, which a simulated
    link (``delays``) lets engines do.
    """
    times_of = _C.Runtime.step_times

    def slow(self):
        times = times_of(self)
        if self.num_measurements > 0:
            times["rates"].host_adam_params_per_second = BESIDE_A_STEP * 1e9
        return times

    setattr(step_measurement, "_measured_host", lambda: dataclasses.replace(H200, host_adam_gparams=rate_alone))
    setattr(_C.Runtime, "step_times", slow)


def out_of_memory_once(module):
    """The next call of ``module`` runs out of memory."""

    def fail(*_):
        handle.remove()
        raise torch.OutOfMemoryError("CUDA out of memory, so the test says")

    handle = module.register_forward_hook(fail)
