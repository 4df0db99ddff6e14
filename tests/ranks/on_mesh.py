import dataclasses
import os
from typing import Any

import pytest
import torch
from torch import nn

from patrickstar import MemoryBudgetError, RankFailure, StateError
from patrickstar.checkpoint.blocks import ComposedTensor
from patrickstar.module.tiled_modules import is_tiled
from patrickstar.runtime import initialize_engine
from tests.ranks.in_turn import train_in_turn
from tests.ranks.sharded import Model, batch, rows_of
from tests.training import ADAM, make_config

SAMPLES = 4  # of a step, on all ranks together
CLIP = 0.5  # acts in every step


@dataclasses.dataclass(frozen=True)
class MeshRun:
    model: Model
    rows: int = 1
    columns: int = 1
    mode: str = "2d"
    sequence: int = 1
    """Ranks that share each sequence and hold the same blocks."""
    sequence_mode: str = "auto"
    kind: str = "plain"
    steps: int = 5
    precision: str = "fp32"
    clip: float = CLIP
    checkpointing: bool | None = None
    """use_reentrant, or None for no checkpointing."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        options = {"gradient_clipping": self.clip, "default_chunk_size": 8192, **self.options}
        config = make_config(self.precision, **options)
        mesh = {"rows": self.rows, "columns": self.columns, "mode": self.mode}
        if self.sequence > 1:
            config["sequence_parallel"] = {"size": self.sequence, "mode": self.sequence_mode}
        return {**config, **self.options, "tensor_parallel": mesh}

    def batches(self) -> list[dict[str, Any]]:
        generator = torch.Generator().manual_seed(1)
        return [batch(generator, self.kind, SAMPLES) for _ in range(self.steps)]

    def own_batches(self) -> list[dict[str, Any]]:
        share = self.sequence * self.rows * self.columns
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        found = self.batches()
        return [{key: rows_of(value, rank // share, world // share) for key, value in one.items()} for one in found]


def train(run: MeshRun) -> dict[str, Any]:
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(run.model.build, 0, run.config())
    with engine:
        engine.train()
        if run.checkpointing is not None:
            engine.module.gradient_checkpointing_enable({"use_reentrant": run.checkpointing})
        losses, norms, scales = [], [], []
        for inputs in run.own_batches():
            loss = engine(**inputs).loss
            engine.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            norms.append(engine.report()["grad_norm"])
            scales.append(engine.report()["loss_scale"])
        engine.eval()
        with torch.no_grad():
            logits = engine.gather_tokens(engine(input_ids=run.batches()[0]["input_ids"]).logits)
        return {
            "losses": losses,
            "norms": norms,
            "scales": scales,
            "logits": logits,
            "state": engine.state_dict(),
            "report": engine.report(),
            "num_elements": sum(p.numel() for p in engine.module.parameters()),
            "num_tiled": sum(map(is_tiled, engine.module.modules())),
        }


def train_all(runs: list[MeshRun]) -> list[dict[str, Any]]:
    return train_in_turn(train, runs)


def train_plainly(run: MeshRun) -> dict[str, Any]:
    torch.manual_seed(0)
    model = run.model.build().train()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses, norms = [], []
    for inputs in run.batches():
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip or float("inf"))))
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=run.batches()[0]["input_ids"]).logits
    return {"losses": losses, "norms": norms, "logits": logits, "state": model.state_dict()}


def go_wrong(which: list[str]) -> list[str]:
    from tests.models import t5

    rank = int(os.environ["RANK"])

    def message(
        build: Any, rows: int, columns: int, call: Any = None, mode: str = "2d", options: dict | None = None
    ) -> str:
        mesh = {"tensor_parallel": {"rows": rows, "columns": columns, "mode": mode}}
        config = make_config("fp32") | mesh | (options or {})
        torch.manual_seed(0)
        try:
            engine, _ = initialize_engine(build, 0, config)
            with engine:
                call(engine)
        except (ValueError, RankFailure, StateError) as error:  # the other rank's may have come first
            return str(error)
        raise AssertionError("nothing went wrong")

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model("llama").build()
            self.head = nn.Linear(2, 2)

    def with_values_of_its_own() -> nn.Module:
        model = llama()
        with torch.no_grad():
            next(model.parameters()).add_(rank)
        return model

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return llama()

    tokens = torch.randint(1, 60, (3, 24), generator=torch.Generator().manual_seed(0))
    llama = Model("llama").build
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 36}
    mistakes = {
        "too many columns": lambda: message(llama, 1, 3),
        "too many for sequences": lambda: message(llama, 1, 2, options={"sequence_parallel": {"size": 2}}),
        "too many ranks": lambda: message(llama, 2, 2),
        "heads": lambda: message(Model("llama", heads).build, 1, 2),
        "features": lambda: message(Model("llama", {"intermediate_size": 33}).build, 1, 2),
        "no plan": lambda: message(t5, 1, 2),
        "parameters beside": lambda: message(Wrapped, 1, 2),
        "other values": lambda: message(with_values_of_its_own, 1, 2),
        "other batches": lambda: message(llama, 1, 2, lambda engine: engine(input_ids=tokens + rank)),
        "samples": lambda: message(llama, 2, 1, lambda engine: engine(input_ids=tokens)),
        "no values": lambda: message(on_meta, 1, 2),
        "tokens": lambda: message(llama, 1, 2, lambda engine: engine(input_ids=tokens[:, :23]), mode="1d"),
    }
    return [mistakes[name]() for name in which]


class RunsOutOnce(nn.Module):
    """Replaces a layer's norm: the last rank's second call runs out of device memory."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2 and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has ...")
        return self.norm(hidden)


def run_out(run: MeshRun) -> str:
    engine, _ = initialize_engine(run.model.build, 0, run.config())
    try:
        with engine:
            layer = engine.module.model.layers[1]
            layer.post_attention_layernorm = RunsOutOnce(layer.post_attention_layernorm)
            for inputs in run.own_batches():
                engine.backward(engine(**inputs).loss)
    except (RankFailure, torch.OutOfMemoryError) as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    raise AssertionError("it did not run out of memory")


def outgrow(run: MeshRun, budgets: tuple[int | None, ...]) -> list[str]:
    ends = []
    for budget in budgets:
        torch.manual_seed(0)
        options = {**run.options, "device_memory": budget}
        engine, optimizer = initialize_engine(run.model.build, 0, dataclasses.replace(run, options=options).config())
        try:
            with engine:
                for inputs in [*run.own_batches(), {k: v.repeat(4, 1) for k, v in run.own_batches()[0].items()}]:
                    loss = engine(**inputs).loss
                    engine.backward(loss)
                    optimizer.step()
                ends.append(f"{loss.item():.9f}")
        except (RankFailure, MemoryBudgetError, torch.OutOfMemoryError) as error:
            ends.append(f"{type(error).__name__}: {error}")
    return ends


def checkpointed(
    folder: str, model: str | Model, rows: int, columns: int, mode: str = "2d", sequence: int = 1
) -> dict[str, Any]:
    from patrickstar.checkpoint import latest_tag

    model = Model(model) if isinstance(model, str) else model
    run, made_whole, state = MeshRun(model, rows, columns, mode, sequence, steps=4), False, {}
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(run.model.build, 0, run.config())
    with engine:
        resumes = latest_tag(folder) is not None
        if resumes:
            with torch.no_grad():
                engine.load_state_dict({name: torch.ones_like(value) for name, value in engine.state_dict().items()})
            made = note_calls(ComposedTensor, "compose")
            engine.load_checkpoint(folder)
            made_whole, state = bool(made), engine.state_dict()
        losses = []
        for step, inputs in list(enumerate(run.own_batches()))[2 if resumes else 0 :]:
            if step == 2 and not resumes:
                engine.save_checkpoint(folder, client_state={"words": "kept"})
                engine.export_weights(f"{folder}/exported")
                state = engine.state_dict()
            loss = engine(**inputs).loss
            engine.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        end = engine.state_dict()
        return {"losses": losses[-2:], "state": end, "half_way": state, "made_whole": made_whole}


def note_calls(owner: type, name: str) -> list[str]:
    called, method = [], getattr(owner, name)

    def noting(*args: Any) -> Any:
        called.append(name)
        return method(*args)

    setattr(owner, name, noting)
    return called


def from_files(folder: str, rows: int, columns: int, mode: str, sequence: int = 1) -> dict[str, Any]:
    from patrickstar import from_pretrained

    run = MeshRun(Model("llama"), rows, columns, mode, sequence, steps=1)
    engine, optimizer = initialize_engine(lambda: from_pretrained(folder), 0, run.config())
    with engine:
        (inputs,) = run.own_batches()
        prompt = inputs["input_ids"][:2, :4]
        tokens = engine.generate(prompt, max_new_tokens=6, do_sample=False)
        engine.train()
        loss = engine(**inputs).loss
        engine.backward(loss)
        optimizer.step()
        module, state = engine.module, engine.state_dict()
    for use in (lambda: module(**inputs), module.state_dict, lambda: module.lm_head(torch.zeros(1, 1, 32))):
        with pytest.raises(
            StateError, match=r"blocks of matrices, .* is closed.* engine.state_dict\(\), whose tensors"
        ):
            use()
    left = "LlamaForCausalLM has blocks of its matrices, which an engine that was closed"
    with pytest.raises((ValueError, RankFailure), match=left):  # the other rank's may have come first
        initialize_engine(lambda: module, 0, run.config())
    again = run.model.build()
    again.load_state_dict(state)
    return {"loss": loss.item(), "tokens": tokens, "after": again(**inputs).loss.item()}


def by_deepspeeds_names(mode: str) -> dict[str, Any]:
    import patrickstar

    torch.manual_seed(0)
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "steps_per_print": 0,
        "tensor_parallel": {"autotp_size": 2, "mode": mode},
    }
    data = [{"input_ids": torch.arange(i, i + 24) % 50, "labels": torch.arange(i, i + 24) % 50} for i in range(4)]
    engine, _, loader, _ = patrickstar.initialize(model=Model("llama").build(), config=config, training_data=data)
    losses = []
    for inputs in loader:
        loss = engine(**inputs).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with pytest.raises(StateError, match="write whole ones with engine.export_weights"):
        engine.save_16bit_model(".")
    with (
        pytest.raises(StateError, match="leave modifier_rank out"),
        patrickstar.zero.GatheredParameters(next(engine.parameters()), modifier_rank=0),
    ):
        pass
    found = {"losses": losses, "num_elements": sum(p.numel() for p in engine.parameters())}
    engine.close()
    return found
