import gc
import sys

import pytest

from patrickstar.engine.open_session import close_open_engine, open_sessions

SETUP = """
import torch
from patrickstar.runtime import initialize_engine
from tests.engine.test_open_engine import Net
config = {"bf16": {"enabled": True}, "default_chunk_size": 1024, "device_memory": "1MiB"}
model = Net()
engines = []
"""
STEP = """
loss = engine(torch.ones(2, 8))
engine.backward(loss)
optimizer.step()
"""


@pytest.fixture
def run():
    from IPython.core.interactiveshell import InteractiveShell  # takes a while to load

    main = sys.modules["__main__"]  # which the shell replaces
    shell = InteractiveShell.instance()

    def run_cell(source):
        result = shell.run_cell(source, store_history=True)
        if result.error_in_exec is not None:
            raise result.error_in_exec
        return shell.user_ns

    run_cell(SETUP)
    yield run_cell
    shell.reset()
    InteractiveShell.clear_instance()
    sys.modules["__main__"] = main
    gc.collect()
    close_open_engine()


CELLS = {
    "a function": "engine, optimizer = initialize_engine(Net, 0, config)",
    "a module": "engine, optimizer = initialize_engine(lambda: model, 0, config)",
    "a schedule": "engine, optimizer = initialize_engine(Net, 0, config)\n"
    "schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)",
    "a magic word": "%%capture\nengine, optimizer = initialize_engine(Net, 0, config)",
    "a function of the notebook": "def build():\n    return initialize_engine(Net, 0, config)\n"
    "engine, optimizer = build()",
    "initialize": "import patrickstar\nengine, optimizer, *_ = patrickstar.initialize(model=Net(), config="
    '{"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}})',
}


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_a_cell_that_is_run_again(cell, run):
    for _ in range(3):
        run(cell)
        assert len(open_sessions()) == 1
        names = run(STEP)
        with pytest.raises(ValueError, match="the loss has shape"):
            run("engine.backward(torch.ones(2))")  # its traceback leads to the engine
    assert open_sessions()[0].owner.face() is names["engine"]


def test_another_budget_in_the_same_cell(run):
    for budget in ("1MiB", "2MiB"):
        run(f'engine, optimizer = initialize_engine(Net, 0, {{**config, "device_memory": "{budget}"}})')
        names = run(STEP)
    assert names["engine"].report()["device_budget_bytes"] == 2**21
    assert len(open_sessions()) == 1


TWO_ENGINES = {
    "a loop": [
        "for _ in range(2):\n    engine, optimizer = initialize_engine(Net, 0, config)\n    engines.append(engine)"
    ],
    "other statements": [
        "teacher, _ = initialize_engine(Net, 0, config)",
        "engine, _ = initialize_engine(Net, 0, config)",
    ],
    "another name": ["engine, _ = initialize_engine(Net, 0, config)\nengines.append(engine)"] * 2,
    "a list": ["engines.append(initialize_engine(Net, 0, config)[0])"] * 2,
    "its module": [
        "engine, _ = initialize_engine(lambda: model, 0, config)\nteacher, model = model, Net()",
        "engine, _ = initialize_engine(lambda: model, 0, config)",
    ],
}


@pytest.mark.parametrize("cells", TWO_ENGINES.values(), ids=TWO_ENGINES)
def test_two_engines_that_are_wanted(cells, run):
    for cell in cells:
        run(cell)
    assert len(open_sessions()) == 2


@pytest.mark.slow
def test_a_list_of_engines_that_is_made_again(run):
    for _ in range(2):
        run(
            "engines = []\nfor _ in range(2):\n    engine, _ = initialize_engine(Net, 0, config)\n"
            "    engines.append(engine)"
        )
        gc.collect()
        assert len(open_sessions()) == 2


def test_an_engine_in_the_way_is_named(run):
    run("first = initialize_engine(Net, 0, config)")
    with pytest.raises(ValueError, match="all engines of a process share one budget") as raised:
        run('second = initialize_engine(Net, 0, {**config, "device_memory": "2MiB"})')
    if hasattr(raised.value, "__notes__"):
        assert "engine.close() frees one that is no longer needed" in raised.value.__notes__[0]
