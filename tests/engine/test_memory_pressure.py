import collections
import gc
import logging
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from patrickstar import _C
from patrickstar.activations.remedies import ActivationRemedies
from patrickstar.config import parse_config
from patrickstar.runtime import initialize_engine
from patrickstar.tensor2d import MeshGroup, parallelize
from tests.bits import assert_same_bits
from tests.models import MODELS, Case, Mlp, gpt2, token_batch
from tests.training import assert_same, least_device_memory, make_config, train

STEPS = 4
LENGTHS = (128, 512, 4096, 256, 2048, 128, 4096)


class TokenWise(nn.Module):
    """Activation memory grows with the sequence, from far below the parameters' to far above."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 128)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(4)
        )
        self.head = nn.Linear(128, 256)

    def forward(self, input_ids, labels=None):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits = self.head(hidden)
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return {"loss": loss, "logits": logits}


def alternating(lengths) -> Case:
    step = -1

    def batch(generator):
        nonlocal step
        step += 1
        tokens = torch.randint(0, 256, (1, lengths[step % len(lengths)]), generator=generator)
        return {"input_ids": tokens, "labels": tokens}

    return Case(TokenWise, batch, lambda out: out["loss"])


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_alternating_sequence_lengths(precision, caplog):
    least = least_device_memory(alternating([4096]), make_config(precision))
    expected = train(alternating(LENGTHS), make_config(precision), steps=len(LENGTHS))
    caplog.set_level(logging.INFO, "patrickstar")
    budget = int(least * 1.02)
    run = train(alternating(LENGTHS), make_config(precision, device_memory=budget), steps=len(LENGTHS))
    assert_same(run, expected)
    assert run.report["device_peak_bytes"] <= budget
    evictions = run.report["num_pressure_evictions"]
    lines = [message for message in caplog.messages if "made room" in message]
    print(f"{least} bytes; {evictions} arrays made room in {len(lines)} of {len(LENGTHS)} steps")
    assert evictions > 0
    assert 0 < len(lines) <= len(LENGTHS)  # one line a step, at most


def test_evaluation_of_longer_batches_between_steps():
    def evaluate(engine, step):
        engine.eval()
        with torch.no_grad():
            engine(input_ids=torch.zeros(1, 4096, dtype=torch.long))
        engine.train()

    least = least_device_memory(alternating([4096]), make_config())
    expected = train(alternating([128, 512]), make_config(), steps=4)
    run = train(alternating([128, 512]), make_config(device_memory=least), steps=4, before_step=evaluate)
    assert_same(run, expected)


class RunsOut(Mlp):
    failures: set[int] = set()
    calls = 0

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(1))
        self.changes_buffer = False

    def forward(self, input_ids, labels):
        RunsOut.calls += 1
        noise = self.dropout(torch.ones(4))
        self.layers[0](self.embed(input_ids))
        if self.changes_buffer:
            self.seen += 1
        if RunsOut.calls in RunsOut.failures:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.07 GiB. GPU 0 has ...")
        out = super().forward(input_ids, labels)
        out["loss"] = out["loss"] * noise.sum()
        return out


def case_that_fails(failures) -> Case:
    RunsOut.failures, RunsOut.calls = set(failures), 0
    return Case(RunsOut, MODELS["mlp"].batch, MODELS["mlp"].loss)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("failures", [[1], [3, 4], [1, 4, 6]])
def test_a_forward_that_ran_out_of_memory_is_repeated(failures, accumulate, caplog):
    config = make_config("bf16", gradient_clipping=1.0)
    expected = train(case_that_fails([]), config, steps=4, accumulate=accumulate)
    run = train(case_that_fails(failures), config, steps=4, accumulate=accumulate)
    assert_same(run, expected)
    lines = [message for message in caplog.messages if "run again" in message]
    assert len(lines) == len(failures)
    assert all("CUDA out of memory; the forward is run again" in line for line in lines)


def test_a_forward_that_always_runs_out_raises():
    case = case_that_fails(range(1, 100))
    with pytest.raises(torch.OutOfMemoryError, match="3.07 GiB"):
        train(case, make_config(), steps=1)
    assert RunsOut.calls == 3


class HeadRunsOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, 64)
        self.heads = nn.ModuleList([TooLarge()])

    def forward(self, inputs):
        return self.heads[0](self.body(inputs))


class TooLarge(nn.Linear):
    def __init__(self):
        super().__init__(64, 64)

    def forward(self, inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ...")


def test_a_forward_that_always_runs_out_says_where_and_what_helps():
    engine, _ = initialize_engine(HeadRunsOut, 0, make_config(device_memory="1MB"))
    with engine:
        inputs = torch.randn(1000, 64)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            engine(inputs)
        (note,) = raised.value.__notes__
        print(note)
        for part in ("in heads.0", "2.5 GiB more", "device_memory is 977 KiB", "at least 2.51GiB", "smaller batch"):
            assert part in note
        assert "Nothing was updated" in note


FUSED, TILED = '"activations": {"loss": "fused"}', '"activations": {"tile_tokens": 4096}'
CHECKPOINTED, LEAVES = "gradient_checkpointing_enable(", '"activations": {"offload": "always"}'


@pytest.mark.parametrize(
    ("activations", "checkpoints", "named", "others"),
    [
        ({}, False, (CHECKPOINTED, FUSED, TILED, LEAVES), ("more host_memory",)),
        ({}, True, (FUSED, TILED, "more host_memory"), (CHECKPOINTED, LEAVES)),
        ({"loss": "fused", "tile_tokens": 8}, False, (CHECKPOINTED, LEAVES), (FUSED, TILED)),
        ({"offload": "never"}, True, (FUSED, TILED, '"activations": {"offload": "auto"}'), (CHECKPOINTED, LEAVES)),
        ({"offload": "always"}, False, (CHECKPOINTED, FUSED, TILED, "more host_memory"), (LEAVES,)),
    ],
)
def test_remedies_are_named_where_they_apply(activations, checkpoints, named, others):
    model = MODELS["llama"].build()
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.model.norm = TooLarge()
    engine, _ = initialize_engine(lambda: model, 0, make_config(activations=activations, prove_rewrites=False))
    with engine:
        with pytest.raises(torch.OutOfMemoryError) as raised:
            engine(**MODELS["llama"].batch(torch.Generator().manual_seed(0)))
        (note,) = raised.value.__notes__
    assert [part for part in named if part not in note] == []
    assert [part for part in others if part in note] == []


def test_remedies_of_a_sharded_model_leave_its_loss():
    model = MODELS["llama"].build()
    parallelize(model, MeshGroup.alone())
    remedies = "; ".join(ActivationRemedies(model, parse_config(make_config())).texts())
    assert TILED in remedies and FUSED not in remedies


def test_remedies_of_other_models_are_no_keys_that_would_be_refused():
    engine, _ = initialize_engine(HeadRunsOut, 0, make_config())
    with engine:
        with pytest.raises(torch.OutOfMemoryError) as raised:
            engine(torch.randn(10, 64))
        (note,) = raised.value.__notes__
    assert "What helps: activation checkpointing (torch.utils.checkpoint); " in note and LEAVES in note
    assert "; a smaller batch or shorter sequences; or a device_memory of at least " in note
    assert FUSED not in note and TILED not in note and CHECKPOINTED not in note


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_buffers_are_as_if_the_first_attempt_had_not_been(precision, caplog):
    case = Case(CountsAndRunsOut, MODELS["mlp"].batch, MODELS["mlp"].loss)
    case_that_fails([])
    expected = train(case, make_config(precision), steps=4)
    case_that_fails([2, 4, 5])  # the second forward once, the third twice
    assert_same(train(case, make_config(precision), steps=4), expected)
    assert len([message for message in caplog.messages if "run again" in message]) == 3
    assert expected.state["counter"].item() == expected.state["assigned"].item() == 4


DTYPES = (torch.bool, torch.float64, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.int16)


class CountsAndRunsOut(RunsOut):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("counter", torch.zeros((), dtype=torch.long))
        self.register_buffer("assigned", torch.zeros(()))
        for dtype in DTYPES:
            self.register_buffer(f"of_{str(dtype)[6:]}", torch.zeros(3, 5, dtype=dtype).t())

    def forward(self, input_ids, labels):
        self.norm(input_ids[:, :8].float().view(-1, 8))
        self.counter += 1
        for dtype in DTYPES:
            buffer = getattr(self, f"of_{str(dtype)[6:]}")
            buffer.copy_(torch.full_like(buffer, self.counter.item() % 2, dtype=torch.float32))
        self.assigned = self.assigned + 1
        return super().forward(input_ids, labels)


def test_buffers_that_were_replaced_are_let_go_of():
    class Replaces(Mlp):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.zeros(4))

        def forward(self, input_ids, labels):
            self.cache += 1
            self.cache = self.cache.clone()
            return super().forward(input_ids, labels)

    engine, _ = initialize_engine(Replaces, 0, make_config())
    data = MODELS["mlp"].batch(torch.Generator().manual_seed(0))
    with engine:
        engine(**data)
        first = weakref.ref(engine.module.cache)
        engine(**data)
        engine(**data)
        gc.collect()
        assert first() is None and engine.module.cache.tolist() == [3.0] * 4


def test_a_buffer_that_changes_for_the_first_time_cannot_be_undone():
    case_that_fails([2])
    engine, _ = initialize_engine(RunsOut, 0, make_config())
    with engine:
        data = MODELS["mlp"].batch(torch.Generator().manual_seed(0))
        engine(**data)
        engine.module.changes_buffer = True
        with pytest.raises(torch.OutOfMemoryError):
            engine(**data)
        assert engine.module.seen.item() == 1


def test_a_backward_that_ran_out_of_memory_can_be_run_again():
    class RunsOutInBackward(Mlp):
        fail = True

        def forward(self, input_ids, labels):
            out = super().forward(input_ids, labels)

            def hook(grad):
                if RunsOutInBackward.fail:
                    RunsOutInBackward.fail = False
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.07 GiB")

            out["loss"].register_hook(hook)
            return out

    data = MODELS["mlp"].batch(torch.Generator().manual_seed(0))
    engine, optimizer = initialize_engine(RunsOutInBackward, 0, make_config())
    with engine:
        with pytest.raises(torch.OutOfMemoryError) as raised:
            engine.backward(engine(**data)["loss"])
        note = "".join(getattr(raised.value, "__notes__", []))
        assert "Run forward and backward of this step again" in note
        assert "If it fails again, turn on activation checkpointing, lower" in note
        engine.backward(engine(**data)["loss"])
        optimizer.step()
        assert engine.report()["num_steps"] == 1


def test_inputs_that_find_no_room(monkeypatch, caplog):
    inputs = torch.randn(2, 64)
    move = torch.Tensor.to
    refused = []

    def refuse_once(tensor, *args, **kwargs):
        if tensor is inputs and not refused:
            refused.append(tensor)
            raise torch.OutOfMemoryError("no room for the batch")
        return move(tensor, *args, **kwargs)

    engine, _ = initialize_engine(lambda: nn.Linear(64, 8), 0, make_config())
    with engine:
        expected = engine(inputs)
        monkeypatch.setattr(torch.Tensor, "to", refuse_once)
        assert engine(inputs).equal(expected)
    assert refused
    assert any("run again" in message for message in caplog.messages)


def test_gradients_that_left_are_back_before_the_step():
    config = make_config("bf16", default_chunk_size=16 * 1024, gradient_clipping=1.0)
    case = Case(lambda: gpt2(hidden=64, layers=6), token_batch)
    budget = 4 * least_device_memory(case, config)

    def trained(rise_bytes):
        torch.manual_seed(0)
        engine, optimizer = initialize_engine(case.build, 0, {**config, "device_memory": budget})
        generator = torch.Generator().manual_seed(1)
        losses, late, after = [], [], []
        with engine:
            engine.train()
            layout, runtime = engine._session.layout, engine._session.runtime

            def num_away():
                states = [
                    chunk
                    for chunk in range(layout.num_chunks)
                    if runtime.is_on_device(chunk, layout.chunk(chunk)["leading_state"])
                ]
                return sum(not runtime.is_on_device(chunk, _C.ArrayKind.GRAD) for chunk in states)

            def rise(_grad):
                if len(losses) == STEPS - 1:  # no plan has foreseen this
                    torch.empty(rise_bytes, dtype=torch.uint8)
                late.append(num_away())

            first = next(module for name, module in engine.module.named_modules() if name.endswith("h.0"))
            first.register_forward_pre_hook(lambda _module, args: args[0].register_hook(rise) and None)
            for _ in range(STEPS):
                optimizer.zero_grad()
                loss = case.loss(engine(**case.batch(generator)))
                engine.backward(loss)
                after.append(num_away())
                optimizer.step()
                losses.append(loss.item())
        return losses, late, after

    expected, usual, _ = trained(0)
    losses, late, after = trained(budget * 6 // 10)
    assert losses == expected
    assert late[-1] > usual[-1] + 2
    assert after[-1] <= late[-1] // 2


INPUTS = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    fails = False

    def __init__(self, act):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.act = nn.Linear(8, 16), nn.Linear(16, 4), act
        self.calls = 0
        self.scales = [1.0]
        self.by_name = collections.defaultdict(list)
        self.rng, self.numpy_rng = random.Random(0), np.random.default_rng(0)
        self.torch_rng = torch.Generator().manual_seed(0)
        self.memory = torch.ones(16)

    def forward(self, x):
        hidden = self.act(self, self.up(x))
        if Model.fails:
            Model.fails = False
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return self.down(hidden.relu())


def numpy_mask(_, hidden):
    return hidden * torch.from_numpy(np.random.rand(16) < 0.8).float()


def python_number(_, hidden):
    return hidden * (1 + random.random())


def own_generators(model, hidden):
    noise = torch.rand(16, generator=model.torch_rng)
    return hidden * (model.rng.random() + model.numpy_rng.random() + noise)


def counter(model, hidden):
    model.calls += 1
    model.seen_first = getattr(model, "seen_first", hidden.shape[0])
    return hidden * 0.9**model.calls


def containers(model, hidden):
    model.scales.append(model.scales[-1] * 0.9)
    model.by_name["hidden"].append(len(model.by_name["hidden"]))
    return hidden * model.scales[-1] * (1 + sum(model.by_name["hidden"]))


def recurrent(model, hidden):
    model.memory = (model.memory * 0.5 + hidden.detach().mean(0)).clone()
    return hidden + model.memory


def written_parameter(model, hidden):
    model.down.weight.data.mul_(0.9)
    return hidden


def losses_of(act, failing_step):
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    engine, optimizer = initialize_engine(lambda: Model(act), 0, make_config())

    def call():
        if act is written_parameter:  # beside the module's own call, as a LightningModule's step may
            engine.module.up.weight.data.mul_(0.9)
        return engine.module(INPUTS)

    with engine:
        losses = []
        for step in range(5):
            Model.fails = step == failing_step
            loss = engine.run_forward(call).square().mean()
            engine.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses, engine.state_dict()


RESTORED = [numpy_mask, python_number, own_generators, counter, containers, recurrent, written_parameter]


@pytest.mark.parametrize("act", RESTORED)
def test_numbers_are_those_of_one_forward(act, caplog):
    assert_same_bits(losses_of(act, 3), losses_of(act, None))
    assert len([message for message in caplog.messages if "the forward is run again" in message]) == 1


def changed_tensor(model, hidden):
    model.memory += 1
    return hidden + model.memory


def changed_table(model, hidden):
    return hidden + model.up.table(torch.arange(6))


def with_renormed_table():
    model = Model(changed_table)
    model.up.table = nn.Embedding(6, 16, max_norm=0.5)
    return model


REFUSED = {"memory": lambda: Model(changed_tensor), "up.table.weight": with_renormed_table}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_undone_is_not_run_again(name):
    engine, _ = initialize_engine(REFUSED[name], 0, make_config())
    with engine:
        Model.fails = True
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 2.00 MiB") as raised:
            engine(INPUTS)
        note = "".join(getattr(raised.value, "__notes__", [name]))
        print(note)
        assert name in note
        engine(INPUTS)
