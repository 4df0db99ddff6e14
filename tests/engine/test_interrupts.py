import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import patrickstar
from patrickstar import torch_scope
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits

NUM_INTERRUPTS = 1000
STEPS_PER_SAVE = 16
WARM_UP_STEPS = 20
MICRO_BATCHES = 2
PACKAGE = str(Path(patrickstar.__file__).parent)

pytestmark = pytest.mark.usefixtures("interruptible")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        with torch_scope():
            self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.layers(x)).float().square().mean()


def config(**options):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 30}},
        "fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 5},
        "gradient_clipping": 0.5,
        **options,
    }


class Run:
    def __init__(self, folder, **options):
        torch.manual_seed(0)
        self.engine, *_ = patrickstar.initialize(model=Net(), config=config(**options))
        self.folder = folder

    def batch(self, step, micro_batch):
        return torch.randn(4, 16, generator=torch.Generator().manual_seed(1000 * step + micro_batch))

    def step(self, step):
        engine = self.engine
        for micro_batch in range(MICRO_BATCHES):
            engine.backward(engine(self.batch(step, micro_batch)))
            engine.step()

    def redo(self, step, interrupts):
        while self.engine.global_steps == step:
            try:
                with interrupts:
                    self.step(step)
            except KeyboardInterrupt:
                interrupts.count += 1
                if self.engine.global_steps == step:
                    self.engine.zero_grad()
        if step % STEPS_PER_SAVE == STEPS_PER_SAVE - 1:
            self._until_done(interrupts, lambda: self.engine.save_checkpoint(self.folder, tag="last"))
            self._until_done(interrupts, lambda: self.engine.load_checkpoint(self.folder))

    def _until_done(self, interrupts, call):
        done = False
        while not done:
            try:
                with interrupts:
                    call()
                done = True
            except KeyboardInterrupt:
                interrupts.count += 1

    def finish(self):
        engine = self.engine
        state = {
            "parameters": dict(engine.state_dict()),
            "optimizer": engine.optimizer.state_dict()["state"],
            "loss_scale": engine.optimizer.loss_scale,
            "lr": engine.get_lr(),
            "counts": [engine.global_steps, engine.global_samples, engine.skipped_steps],
        }
        engine.close()
        return state


class Never:
    count = 0

    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass


class AtRandomInstants:
    """Raises KeyboardInterrupt from an alarm's handler, within a time that grows until a call ends."""

    def __init__(self, seconds):
        self.count = 0
        self._seconds = seconds
        self._attempts = 1
        self._random = random.Random(5)
        signal.signal(signal.SIGALRM, self._interrupt)

    @staticmethod
    def _interrupt(_signum, _frame):
        raise KeyboardInterrupt

    def __enter__(self):
        signal.setitimer(signal.ITIMER_REAL, self._random.uniform(1e-5, self._attempts * self._seconds))

    def __exit__(self, kind, *error):
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._attempts = 1 if kind is None else self._attempts + 1


class AtInstructions:
    """Sends one SIGINT at an instruction of the package's own code, counted from the beginning of each block."""

    def __init__(self, instants):
        self.count = 0
        self._instants = iter(instants)
        self._left = 0

    def __enter__(self):
        self._left = next(self._instants, 0)
        if self._left:
            sys.settrace(self._enter_frame)

    def __exit__(self, *error):
        sys.settrace(None)

    def _enter_frame(self, frame, _event, _argument):
        if not frame.f_code.co_filename.startswith(PACKAGE) or "interrupts.py" in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._count

    def _count(self, _frame, event, _argument):
        if event == "opcode" and self._left > 0:
            self._left -= 1
            if self._left == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._count


@pytest.fixture
def alarm():
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def check(run, num_steps, folder, **options):
    actual = run.finish()
    expected = Run(folder, **options)
    for step in range(num_steps):
        expected.redo(step, Never())
    assert_same_bits(actual, expected.finish(), "the interrupted run")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="roomy", marks=pytest.mark.slow),
        pytest.param({"device_memory": "40KiB", "default_chunk_size": 1024}, id="scarce"),
    ],
)
def test_a_thousand_interrupts_at_random_instants(tmp_path, alarm, options):
    run = Run(tmp_path / "run", **options)
    seconds = []
    for step in range(WARM_UP_STEPS):
        begun = time.perf_counter()
        run.redo(step, Never())
        seconds.append(time.perf_counter() - begun)
    interrupts = AtRandomInstants(sorted(seconds)[WARM_UP_STEPS // 2])
    step = WARM_UP_STEPS
    while interrupts.count < NUM_INTERRUPTS // 2:
        run.redo(step, interrupts)
        step += 1
    print(f"{interrupts.count} interrupts in {step} steps")
    check(run, step, tmp_path / "expected", **options)


def test_interrupts_at_every_part_of_the_engines_code(tmp_path):
    interrupts = AtInstructions(range(3, 6000, 23))
    run = Run(tmp_path / "run")
    for step in range(40):
        run.redo(step, interrupts)
    print(f"{interrupts.count} interrupts")
    assert interrupts.count >= 100
    check(run, 40, tmp_path / "expected")


def test_a_step_is_whole_when_its_interrupt_comes():
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(Net, 0, {"fp16": {"initial_scale_power": 30, "hysteresis": 1}})
    with engine:
        while engine._session.num_steps == 0 or optimizer.step_was_skipped:
            engine.backward(engine(torch.randn(4, 16)))
            steps, scale = engine._session.num_steps, engine.report()["loss_scale"]
            engine._session.runtime = Interrupting(engine._session.runtime)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
            engine._session.runtime = engine._session.runtime.runtime
            assert engine._session.num_steps == steps + 1
            assert optimizer.step_was_skipped == (engine.report()["loss_scale"] < scale)


class Preempted(Exception):  # noqa: N818 (it is no error)
    pass


def test_what_a_handler_raises_comes_out_of_saving_and_loading(tmp_path):
    def preempt(*_):
        raise Preempted

    class Scheduler:
        def state_dict(self):
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)  # at once
            return {}

        def load_state_dict(self, _):
            self.state_dict()

    before = signal.signal(signal.SIGUSR1, preempt)
    try:
        engine, _ = initialize_engine(Net)
        schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)]), 1)
        engine.save_checkpoint(tmp_path, lr_scheduler=schedule)
        for call in (engine.save_checkpoint, engine.load_checkpoint):
            with pytest.raises(Preempted):
                call(tmp_path, lr_scheduler=Scheduler())
    finally:
        signal.signal(signal.SIGUSR1, before)
    engine.load_checkpoint(tmp_path)
    engine.close()


def interrupt(_gradient):
    raise KeyboardInterrupt


@pytest.mark.parametrize("offload", ["never", "always"])
def test_activations_of_an_interrupted_backward_leave_the_device(offload):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x).tanh()  # two ways to each layer: a queue with several nodes
            return x.square().mean()

    engine, optimizer = initialize_engine(Deep, 0, {"activations": {"offload": offload}})
    x = torch.randn(256, 32)
    with engine:
        engine.backward(engine(x))
        optimizer.step()
        activation_memory = engine.report()["device_activation_bytes"]
        for layer in (5, 3, 0):
            handle = engine.module.layers[layer].weight.register_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.backward(engine(x))
            handle.remove()
            assert engine.report()["device_activation_bytes"] <= activation_memory
            optimizer.zero_grad()
        engine(x)
        assert engine.report()["device_activation_bytes"] <= activation_memory


class Interrupting:
    def __init__(self, runtime):
        self.runtime = runtime

    def __getattr__(self, name):
        if name in ("apply_step", "skip_step"):
            signal.raise_signal(signal.SIGINT)
        return getattr(self.runtime, name)
