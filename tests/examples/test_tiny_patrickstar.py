import copy
import itertools
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from examples import tiny_patrickstar as tiny
from tests.pages import DOCS, Page, shows

CHUNK_NUMEL = 1728  # of the largest weights, so that their biases are in the next chunk
SLOT = 4 * CHUNK_NUMEL


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down, self.is_skipped = nn.Linear(width, 3 * width), nn.Linear(3 * width, width), False

    def forward(self, x):
        return x if self.is_skipped else x + self.down(functional.gelu(self.up(x)))


def make_model(*, is_tied=False):
    torch.manual_seed(1)
    layers = [layer for _ in range(3) for layer in (Attention(24), FeedForward(24))]
    model = nn.Sequential(nn.Embedding(64, 24), *layers, nn.Linear(24, 64, bias=False))
    if is_tied:
        model[-1].weight = model[0].weight
    return model


def loss_of(model, tokens):
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, dims=1).flatten())


def batches(num_steps):
    return torch.randint(64, (num_steps, 2, 16), generator=torch.Generator().manual_seed(2))


def trained_by_pytorch(model, num_steps):
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    for tokens in batches(num_steps):
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def masters(engine):
    return [engine.executor.view(tiny.Kind.MASTER, param) for param in engine.executor.layout]


def all_equal(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def storages(engine):
    return {param.untyped_storage().data_ptr(): param.untyped_storage() for param in engine.executor.layout}.values()


@pytest.mark.parametrize("is_tied", [False, True])
def test_parameters_are_those_of_adamw_and_bytes_those_of_the_clock_in_every_budget(is_tied):
    model = make_model(is_tied=is_tied)
    expected = trained_by_pytorch(model, 4)
    moved_by_budget, milliseconds_by_budget = [], []
    for num_slots in (4 + is_tied, 6, 9, 64):
        trained = copy.deepcopy(model)
        engine = tiny.TinyPatrickStar(trained, num_slots * SLOT, CHUNK_NUMEL, lr=3e-3)
        for step, tokens in enumerate(batches(4)):
            loss_of(trained, tokens).backward()
            peak, moved = engine.step()
            clock = tiny.Clock(len(engine.num_params), num_slots)
            for instructions in engine.program:
                clock.run(instructions)
            if step:
                assert (peak, moved) == (clock.peak * SLOT, clock.moved * SLOT)
            assert peak <= num_slots * SLOT and sum(storage.nbytes() for storage in storages(engine)) == 0
        assert all_equal(masters(engine), expected)
        assert clock.moved == tiny.least_moves(engine.planned_trace, num_slots)
        moved_by_budget.append(moved)
        milliseconds_by_budget.append(max(clock.queue_ends.values()))
    assert moved_by_budget == sorted(moved_by_budget, reverse=True) and len(set(moved_by_budget)) > 2
    assert milliseconds_by_budget == sorted(milliseconds_by_budget, reverse=True)


def test_a_step_that_leaves_its_plan_has_the_same_bits():
    model = make_model()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3, foreach=False)
    engine = tiny.TinyPatrickStar(model, 9 * SLOT, CHUNK_NUMEL, lr=3e-3)
    for step, tokens in enumerate(batches(5)):
        for trained in (plain, model):
            order = list(trained)[1:-1]
            loss = loss_of(nn.Sequential(trained[0], *(order[::-1] if step == 2 else order), trained[-1]), tokens)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
    assert all_equal(masters(engine), plain.parameters())


def fewest_moves(trace, num_slots):
    """Dynamic programming over all choices of chunks to keep at each access."""
    costs, grads = {frozenset(): 0}, set()
    for op, chunks in trace:
        if op is tiny.Op.GRAD_TO_HOST:
            grads -= set(chunks)
            costs = {kept - set(chunks): cost + 1 for kept, cost in costs.items()}
        elif op in (tiny.Op.FORWARD, tiny.Op.BACKWARD):
            grads |= set(chunks) if op is tiny.Op.BACKWARD else set()
            room, after = num_slots - len(chunks) - len(grads), {}
            for present, cost in costs.items():
                others = present - set(chunks)
                for count in range(min(room, len(others)) + 1):
                    for kept in itertools.combinations(others, count):
                        key = frozenset({*kept, *chunks})
                        after[key] = min(after.get(key, 10**6), cost + len(set(chunks) - present))
            costs = after
    return min(costs.values())


def test_no_choice_of_evictions_moves_less_than_the_plan():
    generator = torch.Generator().manual_seed(3)
    for num_slots in (3, 4, 5):
        for _ in range(10):
            forward = [(chunk,) for chunk in torch.randint(6, (10,), generator=generator).tolist()]
            trace = [(tiny.Op.FORWARD, chunks) for chunks in forward]
            for t, chunks in reversed(list(enumerate(forward))):
                trace.append((tiny.Op.BACKWARD, chunks))
                trace += [(tiny.Op.GRAD_TO_HOST, chunks)] if chunks not in forward[:t] else []
            fewest = fewest_moves(trace, num_slots + 5)
            tiny.make_plan([*trace, (tiny.Op.UPDATE, ())], clock := tiny.Clock(6, num_slots + 5))
            assert clock.moved == fewest == tiny.least_moves(trace, num_slots + 5)


def test_a_budget_below_the_largest_module_is_refused_before_the_model_changes():
    model = make_model()
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=rf"budget is {4 * SLOT - 1} bytes, 1.qkv needs {4 * SLOT}: raise budget"):
        tiny.TinyPatrickStar(model, 4 * SLOT - 1, CHUNK_NUMEL, lr=3e-3)
    assert all_equal(model.parameters(), before.parameters())
    loss_of(model, batches(1)[0]).backward()  # no hook was left


def test_a_first_step_that_does_not_fit_updates_nothing():
    model = make_model()
    before = copy.deepcopy(model)
    engine = tiny.TinyPatrickStar(model, 6 * SLOT, CHUNK_NUMEL, lr=3e-3)
    with pytest.raises(MemoryError, match=f"{6 * SLOT} of {6 * SLOT} bytes are taken, {SLOT} do not fit: raise budget"):
        loss_of(nn.Sequential(model[0], *list(model)[-2:0:-1], model[-1]), batches(1)[0]).backward()
    assert tiny.Op.GRAD_TO_HOST in [op for op, _ in engine.trace]
    assert all_equal(masters(engine), before.parameters())


def test_models_that_it_cannot_train_are_refused_by_name():
    with pytest.raises(ValueError, match="the model has parameters beside submodules"):
        tiny.TinyPatrickStar(nn.MultiheadAttention(8, 2), 64 * SLOT, CHUNK_NUMEL, lr=3e-3)
    for unsuitable in (nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2).requires_grad_(False)):
        with pytest.raises(ValueError, match="weight is torch.*, or frozen: only float32 parameters that are trained"):
            tiny.TinyPatrickStar(unsuitable, 64 * SLOT, CHUNK_NUMEL, lr=3e-3)
    with pytest.raises(ValueError, match="weight has 4096 elements, a chunk 1728: raise chunk_numel"):
        tiny.TinyPatrickStar(nn.Linear(64, 64), 64 * SLOT, CHUNK_NUMEL, lr=3e-3)
    model = make_model()
    engine = tiny.TinyPatrickStar(model, 64 * SLOT, CHUNK_NUMEL, lr=3e-3)
    model[2].is_skipped = True
    loss_of(model, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match="each parameter must get one gradient in each step"):
        engine.step()


def test_an_instruction_that_reads_a_missing_array_is_refused():
    clock = tiny.Clock(num_chunks=1, num_slots=2)
    with pytest.raises(RuntimeError, match="FORWARD of chunk 0 reads PARAM, which does not exist"):
        clock.run([(tiny.Op.FETCH, 0), (tiny.Op.EVICT, 0), (tiny.Op.FORWARD, 0)])


def test_main_prints_what_the_page_says_within_300_lines(capsys):
    page = Page(DOCS / "tiny.md")
    tiny.main()
    printed = capsys.readouterr().out
    (block,) = page.blocks("")
    assert block.text.endswith("bitwise equal to torch.optim.AdamW: True\n")
    assert shows(printed, block.text.partition("\n")[2])
    rows = re.findall(r"^\| ([0-9 |]+) \|$", page.text, re.MULTILINE)
    assert len(rows) == 4 and all(row.replace(" | ", "\t") in printed.splitlines() for row in rows)
    assert len(Path(tiny.__file__).read_text(encoding="utf-8").splitlines()) <= 300
