import atexit
import contextlib
import ctypes
import gc
import os
import pickle
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import patrickstar
from patrickstar import StateError
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.lifetimes import WIDTH, Tower
from tests.training import make_config

PATIENCE_SECONDS = 30  # the alarm of a hanging fork


def refusals(engine, optimizer, loss, folder):
    x = torch.randn(4, WIDTH)
    weight = engine.module.layers[0].weight

    def evaluate():
        with torch.no_grad():
            engine(x)

    def gather():
        with patrickstar.zero.GatheredParameters([weight], modifier_rank=0):
            pass

    calls = {
        "forward": lambda: engine(x),
        "evaluation": evaluate,
        "the module's forward": lambda: engine.module(x),
        "backward": lambda: engine.backward(loss),
        "step": optimizer.step,
        "zero_grad": engine.zero_grad,
        "grad_norm": engine.grad_norm,
        "state_dict": engine.state_dict,
        "module.state_dict": engine.module.state_dict,
        "load_state_dict": lambda: engine.load_state_dict(Tower().state_dict()),
        "save_checkpoint": lambda: engine.save_checkpoint(folder),
        "load_checkpoint": lambda: engine.load_checkpoint(folder),
        "export_weights": lambda: engine.export_weights(folder),
        "report": engine.report,
        "a parameter": lambda: weight.sum(),
        "GatheredParameters": gather,
        "close": engine.close,
        "close_open_engine": patrickstar.close_open_engine,
        "a new engine": lambda: initialize_engine(Tower, 0, make_config("bf16")),
    }
    errors = {}
    for name, call in calls.items():
        try:
            call()
            errors[name] = "none"
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    with contextlib.suppress(StateError):  # single-rank errors
        engine.__exit__(ValueError, ValueError("the end of a fork"), None)
    return errors


def in_a_fork(work, leave):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(PATIENCE_SECONDS)
            os.close(reading)
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(work(), pipe)
            leave()
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return pickle.loads(said) if said else None, status


def leave_at_once():
    os._exit(0)


def leave_by_exit():
    gc.collect()
    atexit._run_exitfuncs()
    ctypes.CDLL(None).exit(0)


class Reads(Dataset):
    def __init__(self, work):
        self.work = work

    def __len__(self):
        return 1

    def __getitem__(self, _):
        return self.work()


def in_a_worker(work):
    loader = DataLoader(Reads(work), batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=60)
    return next(iter(loader))


def train(folder, forking):
    torch.manual_seed(0)
    config = make_config("bf16", default_chunk_size=8192, device_memory="1MiB", rank_timeout_seconds=60)
    engine, optimizer = initialize_engine(Tower, 0, config)
    said, losses = [], []
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", 0)))
    with engine:

        def fork(*ways):
            for way in ways if forking else ():
                said.append(way(lambda: refusals(engine, optimizer, losses[-1], folder)))
                assert list(Path(folder).iterdir()) == []

        def forked(leave):
            def way(work):
                errors, status = in_a_fork(work, leave)
                assert status == 0, (leave.__name__, status, errors)
                return errors

            return way

        for step in range(4):
            losses.append(engine(torch.randn(4, WIDTH, generator=generator)))
            if step == 1:
                fork(forked(leave_by_exit))
            engine.backward(losses[-1])
            if step == 2:
                fork(forked(leave_at_once), in_a_worker)
            optimizer.step()
            losses[-1] = losses[-1].detach()
            if step == 2:
                fork(forked(leave_by_exit))
        return [loss.item() for loss in losses], engine.state_dict(), said


def train_with_and_without_forks(folder):
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    runs = train(folder, True), train(folder, False)
    if dist.is_initialized():
        dist.destroy_process_group()
    return runs


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_forks(num_ranks, tmp_path):
    for (losses, state, said), plain in run_ranks(num_ranks, train_with_and_without_forks, str(tmp_path)):
        assert_same_bits((losses, state), plain[:2])
        assert len(said) == 4
        for errors in said:
            assert {call: error for call, error in errors.items() if "this process is a fork of" not in error} == {}
