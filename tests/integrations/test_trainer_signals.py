"""A scheduler's signal ends a Trainer's or an Accelerate loop's process with a checkpoint; the next start goes on."""

import os
import signal

import pytest
import torch
from transformers import TrainerCallback

from patrickstar import SavedRun
from patrickstar.integrations.accelerate import PatrickStarAccelerator
from patrickstar.integrations.elastic_trainer import ElasticTrainer, ElasticTraining
from patrickstar.integrations.engine_states import last_complete
from patrickstar.integrations.transformers import PatrickStarTrainer
from tests.bits import assert_same_bits
from tests.distributed import rank_outcomes, run_ranks
from tests.engine.saved_run import Clock
from tests.integrations.test_accelerate import parts, run_loop
from tests.integrations.trainer_runs import arguments, engine_config, gpt2, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore")
PREEMPTED = 75
SIGNALLED_STEP = 3


class Log(TrainerCallback):
    """Notes steps."""

    def __init__(self):
        self.steps = []

    def on_step_end(self, args, state, *_, **__):
        self.steps.append(state.global_step)


def trained(folder, signum=None, stopped_rank=0, clock=None, grace=None, **more):
    """Steps that this start makes, and the values at the end. A signal comes in the second of the third step's three
    forwards, of 10 s by ``clock``.
    """
    resume = {"resume": "auto"} if grace is None else {"resume": "auto", "grace_seconds": grace}
    options = {"gradient_accumulation_steps": 3, "max_steps": 6, "dropout": 0.3, **more}
    trainer = make_trainer(PatrickStarTrainer, folder, config=resume, **options)
    log, forwards = Log(), []
    trainer.add_callback(log)

    def at_forward(*_):
        forwards.append(trainer.state.global_step)
        if clock is not None:
            clock.seconds += 10
        stops = signum is not None and int(os.environ.get("RANK") or 0) == stopped_rank
        if stops and forwards.count(SIGNALLED_STEP - 1) == 2 and forwards[-1] == SIGNALLED_STEP - 1:
            signal.raise_signal(signum)

    trainer.model.transformer.register_forward_pre_hook(at_forward)
    try:
        trainer.train()
    finally:
        trainer.close()
    return log.steps, trainer.model.state_dict()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("whole"))[1]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_finishes_the_step_and_the_next_start_goes_on_with_the_same_bits(signum, whole, tmp_path):
    former = signal.getsignal(signum)
    with pytest.raises(SystemExit) as ended:
        trained(tmp_path, signum)
    assert ended.value.code == PREEMPTED
    assert signal.getsignal(signum) is former
    assert last_complete(tmp_path.iterdir()).name == f"checkpoint-{SIGNALLED_STEP}"
    steps, found = trained(tmp_path)
    assert steps == [4, 5, 6]
    assert_same_bits(found, whole)


@pytest.mark.parametrize("saves", [{}, {"save_strategy": "steps", "save_steps": 2}])
def test_a_step_that_does_not_fit_is_undone(saves, whole, tmp_path, monkeypatch):
    with pytest.raises(SystemExit) as ended:
        trained(tmp_path, signal.SIGTERM, clock=Clock(monkeypatch), grace=9, **saves)
    assert ended.value.code == PREEMPTED
    assert last_complete(tmp_path.iterdir()).name == f"checkpoint-{SIGNALLED_STEP - 1}"
    steps, found = trained(tmp_path)
    assert steps == [3, 4, 5, 6]
    assert_same_bits(found, whole)


@pytest.mark.slow
def test_one_ranks_signal_ends_all_in_the_same_step(tmp_path):
    ended = rank_outcomes(2, trained, str(tmp_path), signal.SIGTERM, 1)
    assert [rank.error for rank in ended] == [f"SystemExit: {PREEMPTED}"] * 2
    assert last_complete(tmp_path.iterdir()).name == f"checkpoint-{SIGNALLED_STEP}"
    assert [steps for steps, _ in run_ranks(2, trained, str(tmp_path))] == [[4, 5, 6]] * 2


def test_a_checkpoint_whose_weights_were_interrupted_is_passed_over(whole, tmp_path):
    with pytest.raises(SystemExit):
        trained(tmp_path, signal.SIGTERM)
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "model.safetensors").write_bytes(b"half")
    steps, found = trained(tmp_path)
    assert steps == [4, 5, 6]
    assert_same_bits(found, whole)


@pytest.mark.parametrize(
    ("config", "more", "match"),
    [
        ({"resume": "always"}, {}, "resume is 'always'; give 'auto'"),
        ({"grace_seconds": 5}, {}, "grace_seconds has no effect without 'resume': 'auto'"),
        ({}, {"enable_jit_checkpoint": True}, "put 'resume': 'auto' into patrickstar_config"),
        ({"resume": "auto"}, {"save_only_model": True}, "save_only_model is set"),
    ],
)
def test_what_could_not_go_on_is_refused(config, more, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        make_trainer(PatrickStarTrainer, tmp_path, config=config, **more).train()


def accelerated(folder, num_steps, stops):
    """Steps of an Accelerate loop in a SavedRun, and the values at the end."""
    torch.manual_seed(3)
    accelerator = PatrickStarAccelerator(cpu=True, patrickstar_config=engine_config())
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())
    batches, made = list(loader), []
    with accelerator.engine as engine, SavedRun(engine, folder, lr_scheduler=scheduler) as run:
        for step in range(run.client_state.get("step", 0), num_steps):
            run_loop(accelerator, (model, optimizer, [batches[step]], scheduler), steps=1)
            made.append(step)
            if stops and step == 1:
                signal.raise_signal(signal.SIGTERM)
            run.after_step({"step": step + 1})
        return made, accelerator.get_state_dict(model)


def test_an_accelerate_loop_goes_on_by_a_saved_run(tmp_path):
    with pytest.raises(SystemExit) as ended:
        accelerated(tmp_path / "parts", 4, stops=True)
    assert ended.value.code == PREEMPTED
    made, found = accelerated(tmp_path / "parts", 4, stops=False)
    assert made == [2, 3]
    assert_same_bits(found, accelerated(tmp_path / "whole", 4, stops=False)[1])


def test_an_elastic_trainer_has_its_own(tmp_path):
    with pytest.raises(ValueError, match="an elastic run goes on by itself"):
        ElasticTrainer(
            model=gpt2(),
            args=arguments(tmp_path, gradient_accumulation_steps=1),
            patrickstar_config={"resume": "auto"},
            elastic=ElasticTraining(global_batch=2),
        )
