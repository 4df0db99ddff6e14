import json
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from patrickstar import _C, MemoryBudgetError, RankFailure
from patrickstar.config import Dialect, parse_config
from patrickstar.machine.host_memory import usable_bytes
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.distributed import run_python, run_ranks
from tests.models import VOCAB, Case, Mlp, gpt2, token_batch
from tests.training import least_device_memory, least_named, make_config

_INIT_SCRIPT = """
import json, resource, sys
import torch
from torch import nn
import patrickstar
from patrickstar.runtime import initialize_engine

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

torch.set_num_threads(2)
weight = nn.Parameter(torch.zeros(4, 4))  # PyTorch's lazy loading is not counted
(torch.zeros(1, 4).bfloat16() @ weight.bfloat16()).sum().backward()
torch.optim.AdamW([weight]).step()
width, depth = 1024, 48
config = {"bf16": {"enabled": True}, "default_chunk_size": 4 * 1024 * 1024, "device_memory": "64MiB"}
before = peak()
model_func = lambda: nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])
engine, optimizer = initialize_engine(model_func, 0, config)
after_init = peak() - before
loss = engine(torch.randn(4, width)).float().square().mean()
engine.backward(loss)
optimizer.step()
report = engine.report()
figures = {"num_parameters": report["num_parameters"], "init": after_init, "step": peak() - before}
figures |= {"host": report["host_peak_bytes"], "device": report["device_peak_bytes"]}
print(json.dumps(figures))
"""


def test_the_model_is_never_held_twice():
    """50 M parameters: 4 bytes each while the model is built, and one chunk; 14 in training, and the device's
    buffers.
    """
    done = run_python("-c", _INIT_SCRIPT)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    count = figures["num_parameters"]
    per_param = {key: figures[key] / count for key in ("init", "step", "host")}
    print(f"{count} parameters; bytes per parameter: {per_param}")
    chunk_bytes = 4 * 4 * 1024 * 1024
    slack = 32 * 1024 * 1024
    assert figures["init"] <= 4 * count + 2 * chunk_bytes + slack
    assert figures["step"] <= 14 * count + figures["device"] + chunk_bytes + slack
    assert figures["host"] <= 14.2 * count


def test_host_budget_is_kept():
    config = make_config("bf16", default_chunk_size=2048, device_memory="200KB")
    config["optimizer"]["params"]["use_hybrid_adam"] = False
    count = sum(p.numel() for p in Mlp().parameters())
    budget = 14 * count + 64 * 1024
    engine, optimizer = initialize_engine(Mlp, 0, {**config, "host_memory": budget})
    with engine:
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            optimizer.zero_grad()
            engine.backward(engine(**token_batch(generator))["loss"])
            optimizer.step()
        report = engine.report()
        print(f"{report['host_peak_bytes'] / count:.2f} bytes per parameter of {budget / count:.2f}")
        assert report["host_peak_bytes"] <= budget == report["host_budget_bytes"]
        engine.backward(engine(**token_batch(generator))["loss"])
        with pytest.raises(MemoryBudgetError, match="raise host_memory"):
            engine.backward(engine(**token_batch(generator))["loss"])


def test_states_go_to_the_device_when_the_host_is_full():
    def run(**budgets):
        torch.manual_seed(0)
        engine, optimizer = initialize_engine(Mlp, 0, make_config("bf16", default_chunk_size=2048, **budgets))
        losses = []
        with engine:
            generator = torch.Generator().manual_seed(0)
            for _ in range(4):
                optimizer.zero_grad()
                loss = engine(**token_batch(generator))["loss"]
                engine.backward(loss)
                optimizer.step()
                losses.append(loss.item())
            return losses, engine.report()

    losses, report = run(device_memory="600KB", host_memory="150KB")
    print(f"{report['num_device_state_chunks']} of {report['num_chunks']} chunks have their states on the device")
    assert report["num_device_state_chunks"] > 0
    assert report["host_peak_bytes"] <= 150_000
    assert report["device_peak_bytes"] <= 600_000
    assert losses == run()[0]


def test_available_host_memory():
    assert 2**28 < usable_bytes() < 2**50


SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
MODELS = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},  # changes its logits
    "SmolLM3": {},
    "Gemma3": {"head_dim": 8, "sliding_window": 16},
}


def case_of(name, shape=SHAPE, tokens_per_sample=64):
    import transformers

    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")

    def build():
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config(**shape, **MODELS[name]))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def batch(generator):
        tokens = torch.randint(3, shape["vocab_size"], (2, tokens_per_sample), generator=generator)
        return {"input_ids": tokens, "labels": tokens}

    return Case(build, batch)


def check_fits(case, config, budget):
    batch = case.batch(torch.Generator().manual_seed(1))
    engine, optimizer = initialize_engine(case.build, 0, {**config, "device_memory": budget})
    with engine:
        for _ in range(2):
            engine.train()
            engine.backward(engine(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                assert engine.eval()(**batch).loss.isfinite()
            prompt = batch["input_ids"][:, :8].to(engine.device)
            tokens = engine.module.generate(prompt, max_new_tokens=3, do_sample=False)
            assert tokens.shape == (2, 11)
        assert engine.report()["device_peak_bytes"] <= budget


@pytest.mark.parametrize("loss", ["whole", "fused"])
@pytest.mark.parametrize("name", MODELS)
def test_they_fit_where_training_fits(name, loss):
    case = case_of(name)
    config = make_config("bf16", default_chunk_size=16384, activations={"loss": loss})
    check_fits(case, config, least_device_memory(case, config, steps=2))


ROWS = [4, 4, 48, 4, 160]
"""Rows of each step's batch on the first rank; the second has half of them in odd steps."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x.square().mean()


def train(budget, done):
    rank = int(os.environ.get("RANK", 0))
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(Net, 0, {"device_memory": budget, "default_chunk_size": 4160})
    with engine:
        for step, rows in enumerate(ROWS):
            generator = torch.Generator().manual_seed(10 * step + rank)
            optimizer.zero_grad()
            engine.backward(engine(torch.randn(rows // (1 + rank * (step % 2)), 64, generator=generator)))
            optimizer.step()
            done.append(step)
        return engine.state_dict()


def climb():
    """Obeys each error; (budget, steps done) of each attempt."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
    seen, budget = [], 1
    while True:
        done = []
        try:
            state = train(budget, done)
            break
        except (MemoryBudgetError, RankFailure) as error:  # RankFailure: another rank raised first
            named = least_named(error)
        finally:
            seen.append((budget, len(done)))
        budget = named
    roomy = train(10**9, [])
    if dist.is_initialized():
        dist.destroy_process_group()
    assert_same_bits(state, roomy)
    return seen


def check(seen):
    print(seen)
    budgets, steps = zip(*seen, strict=True)
    assert list(budgets) == sorted(set(budgets)), "each error names more than what there was"
    # The first error, from opening the engine, excludes the activations and says so.
    assert list(steps[1:]) == sorted(set(steps[1:])), "each step that failed is passed with the budget that was named"
    assert steps[-1] == len(ROWS)


def test_one_process():
    check(climb())


def test_remedies_for_the_device_come_in_order():
    """Training, evaluation (where checkpointing saves nothing), and an allocation between calls."""
    few, many = torch.randn(4, 64), torch.randn(512, 64)
    checkpointing = r"turn on activation checkpointing if it is off \(model.gradient_checkpointing_enable\(\)\)"
    engine, optimizer = initialize_engine(Net, 0, {"device_memory": "128KiB", "default_chunk_size": 4160})
    with engine:
        engine.backward(engine(few))
        optimizer.step()
        remedies = rf"evicted; {checkpointing}, lower the batch size, raise device_memory to at least \d.*, or lower"
        with pytest.raises(MemoryBudgetError, match=rf"^device_memory is 128 KiB, but this step needs \d.*{remedies}"):
            engine.backward(engine(many))
        needs = r"this forward pass needs \d.* evicted; lower the batch size, raise device_memory to at least \d"
        with torch.no_grad(), pytest.raises(MemoryBudgetError, match=needs):
            engine(many)
        refused = rf": 1 MiB more are needed, .* of 128 KiB are .*; {checkpointing}, lower the batch size, or raise"
        with pytest.raises(torch.OutOfMemoryError, match=refused) as caught:
            torch.empty(2**20, dtype=torch.uint8)
        assert 2**20 <= least_named(caught.value) < 2**20 + 2**17


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks(num_ranks):
    results = run_ranks(num_ranks, climb)
    check(results[0])
    assert results.count(results[0]) == num_ranks


STEPS = 3


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 30, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, pad_token_id=0, **sizes))


CASES = {"gpt2": Case(lambda: gpt2(hidden=64, layers=36), token_batch), "llama": Case(llama, token_batch)}


def peaks(case, config, accumulate=1):
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(case.build, 0, config)
    with engine:
        engine.train()
        generator = torch.Generator().manual_seed(1)
        for step in range(STEPS):
            for _ in range(accumulate):
                engine.backward(case.loss(engine(**case.batch(generator))))
            if step == 0:
                engine.grad_norm()
                before = engine.report()
            optimizer.step()
        chunks = [engine._session.layout.chunk(index) for index in range(before["num_chunks"])]
        assert max(chunk["numel"] for chunk in chunks) <= 0.01 * sum(chunk["numel"] for chunk in chunks)
        return before, engine.report()


SETTINGS = [(4, 4.0, "always", 0.0), (4, 0.9, "always", 0.0), (2, 1.1, "always", 1e-3)]
"""Device budget over an eighth of the host's need, host budget over that need, speculation, clipping."""


@pytest.mark.parametrize(
    ("name", "precision"), [pytest.param("gpt2", "bf16", marks=pytest.mark.slow), ("llama", "fp32")]
)
def test_predicted_against_mapped(name, precision):
    case = CASES[name]
    base = make_config(precision, default_chunk_size=8 * 1024)
    engine, _ = initialize_engine(case.build, 0, base)
    with engine:
        _, need, _ = _C.initial_placement(engine._session.layout, 2**60, 0)
    for device_share, host_share, speculation, clipping in SETTINGS:
        config = {**base, "device_memory": int(need / 8 * device_share), "host_memory": int(need * host_share)}
        config |= {"gradient_clipping": clipping, "optimizer": {**base["optimizer"], "speculation": speculation}}
        before, after = peaks(case, config)
        predicted, mapped = before["predicted_host_peak_bytes"], after["host_peak_bytes"]
        print(
            f"{device_share} {host_share} {speculation} {clipping}: {predicted} {mapped} {predicted / mapped - 1:+.2%}"
        )
        assert mapped <= predicted <= 1.05 * mapped


def test_gradients_that_accumulate():
    config = make_config("bf16", default_chunk_size=8 * 1024, device_memory="6MB")
    config |= {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0}
    before, after = peaks(CASES["gpt2"], parse_config(config, Dialect.DEEPSPEED), accumulate=2)
    predicted, mapped = before["predicted_host_peak_bytes"], after["host_peak_bytes"]
    print(f"{predicted} {mapped} {predicted / mapped - 1:+.2%}")
    assert mapped <= predicted <= 1.05 * mapped


def test_plans_without_an_engine_say_the_same():
    config = make_config("bf16", default_chunk_size=8 * 1024, device_memory="12MB", host_memory="60MB")
    config["optimizer"]["speculation"] = "always"
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(CASES["gpt2"].build, 0, config)
    with engine:
        engine.train()
        engine.backward(CASES["gpt2"].loss(engine(**token_batch(torch.Generator().manual_seed(1)))))
        optimizer.step()
        report, chunks = engine.report(), engine.plan().chunks
        on_device = [chunk.states_on_device for chunk in chunks]
        assert 0 < sum(on_device) < len(chunks)
        layout = engine._session.layout
        found = _C.host_peak_bytes(layout, [_C.Tier.HOST] * len(chunks), on_device, 60 * 10**6, updates_ahead=True)
        assert found == report["predicted_host_peak_bytes"]
