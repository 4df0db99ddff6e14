import threading

import torch
from torch import nn

from patrickstar import _C
from patrickstar.ranks.exchanges import ThreadExchanges
from patrickstar.runtime import initialize_engine
from tests.training import make_config


class Nobody:
    rank, size = 0, 2

    def __init__(self):
        self.calls = []

    def exchange(self, sends, receives):
        self.calls.append((threading.current_thread(), sends, receives))


class Sending(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weight, exchanges):
        ctx.save_for_backward(rows, weight)
        out = rows @ weight.t()
        exchanges.begin([(1, weight)], []).wait()
        return out

    @staticmethod
    def backward(ctx, grad):
        rows, weight = ctx.saved_tensors
        with torch._C.DisableTorchFunctionSubclass():
            return grad @ weight, grad.t() @ rows, None


class SendingLinear(nn.Linear):
    def forward(self, rows):
        return Sending.apply(rows, self.weight, self.exchanges)


def test_parameters_that_are_sent_are_used_by_the_thread_that_sends_them():
    communicator = Nobody()

    def build():
        layer = SendingLinear(32, 32, bias=False)
        layer.exchanges = ThreadExchanges(communicator)
        return nn.Sequential(nn.Linear(32, 32, bias=False), layer, nn.Linear(32, 32, bias=False))

    engine, optimizer = initialize_engine(build, 0, make_config("fp32", default_chunk_size=1024))
    with engine:
        engine.backward(engine(torch.ones(2, 32)).sum())
        optimizer.step()
        moments = engine._session.runtime.timeline()
    backward = [moment["accesses"] for moment in moments if moment["phase"] == _C.Phase.BACKWARD]
    held = [[chunk for chunk, kind, _ in accesses if kind == _C.ArrayKind.PARAM] for accesses in backward]
    assert held == [[2], [1], [0]]
    ((thread, (message,), receives),) = communicator.calls
    assert thread is not threading.current_thread()
    assert message[::2] == (1, 32 * 32 * 4) and receives == []
