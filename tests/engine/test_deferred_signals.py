import os
import signal
import threading

import pytest
import torch

from patrickstar import _C
from patrickstar.session.interrupts import deferred_signals

pytestmark = pytest.mark.usefixtures("interruptible")


class NoListener(_C.UseListener):
    def open_scope(self, params, until):
        return 0


OBSERVER = _C.UseObserver(NoListener(), lambda result: None)


def come(signum=signal.SIGINT):
    signal.raise_signal(signum)


def test_signals_wait_until_the_block_ends():
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_signals():
        come()
        come()
        done.append("all of it")
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def hook():
    _C.ModuleHook(OBSERVER).before_forward(None, None)


def test_allowed_signals_come_at_hooks_and_what_cleans_up_is_not_interrupted():
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_signals() as signals:
        hook()
        try:
            with signals.allowed():
                hook()
                come()
                done.append("until the next hook")
                hook()
                done.append("never")
        except KeyboardInterrupt:
            come()
            hook()
            done.append("cleaned up")
            raise
    assert done == ["until the next hook", "cleaned up"]
    hook()


def test_a_signal_that_takes_an_errors_place_keeps_its_notes():
    with pytest.raises(KeyboardInterrupt) as raised, deferred_signals():
        come()
        error = ValueError("what was interrupted")
        if hasattr(error, "add_note"):  # not with Python 3.10
            error.add_note("what it has left")
        raise error
    assert getattr(raised.value, "__notes__", []) == getattr(error, "__notes__", [])


def test_a_second_signal_comes_at_once():
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_signals() as signals:
        try:
            with signals.allowed():
                come()
                done.append("waiting")
                come()
                done.append("never")
        except KeyboardInterrupt:
            done.append("cleaned up")
            raise
    assert done == ["waiting", "cleaned up"]


def test_without_a_hook_the_call_ends_and_then_the_block():
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_signals() as signals:
        with signals.allowed():
            come()
        done.append("ended")
    assert done == ["ended"]


def test_what_came_before_an_allowed_block_comes_at_its_beginning():
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_signals() as signals:
        come()
        with signals.allowed():
            done.append("never")
    assert done == []


def test_blocks_nest():
    order = []
    with pytest.raises(KeyboardInterrupt), deferred_signals() as outer:
        try:
            with outer.allowed():
                with deferred_signals():
                    come()
                    hook()
                    order.append("inner")
                order.append("outer")
                hook()
                order.append("never")
        except KeyboardInterrupt:
            order.append("at the first hook after the inner block")
            raise
    assert order == ["inner", "outer", "at the first hook after the inner block"]
    with pytest.raises(KeyboardInterrupt):
        come()


def test_a_handler_that_does_not_raise_is_called_at_each_hook():
    calls = []
    before = signal.signal(signal.SIGUSR1, lambda *_: calls.append(len(calls)))
    try:
        with deferred_signals() as signals:
            come(signal.SIGUSR1)
            assert calls == []
            with signals.allowed():
                assert calls == [0]
                for _ in range(2):
                    come(signal.SIGUSR1)
                    hook()
                assert calls == [0, 1, 2]
                come(signal.SIGUSR1)
            assert calls == [0, 1, 2]
        assert calls == [0, 1, 2, 3]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_end_of_a_dataloaders_worker_is_told_after_the_block():
    batches = iter(torch.utils.data.DataLoader(range(100), num_workers=1))
    next(batches)
    (worker,) = batches._workers
    with pytest.raises(RuntimeError, match=f"DataLoader worker .pid.* {worker.pid}. "), deferred_signals():
        worker.kill()
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)  # leaves the status to the handler
        done = True
    assert done


def test_hooks_on_other_threads_deliver_nothing():
    with pytest.raises(KeyboardInterrupt), deferred_signals() as signals:
        with signals.allowed():
            come()
            thread = threading.Thread(target=hook)
            thread.start()
            thread.join()
        done = True
    assert done


def test_a_handler_that_is_set_meanwhile_stays():
    def mine(*_):
        raise NotImplementedError

    with deferred_signals() as signals, signals.allowed():
        signal.signal(signal.SIGINT, mine)
    try:
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_are_left_alone():
    found = []

    def use():
        with deferred_signals() as signals, signals.allowed():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
