import dataclasses
import os
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from patrickstar import RankFailure
from patrickstar.activations.activation_rules import Saved
from patrickstar.runtime import initialize_engine
from patrickstar.sequence import attention
from tests import text_models
from tests.models import VOCAB
from tests.ranks.in_turn import train_in_turn
from tests.training import make_config

BATCH, LENGTH = 2, 24


@dataclasses.dataclass(frozen=True)
class Model:
    name: str
    """A model type, or a class name."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def build(self) -> nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

        if "For" in self.name:
            return text_models.build(self.name)
        common = {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
        }
        if self.name == "gpt2":
            common = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB,
                      "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
                      "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
        if self.name == "bert":
            common |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        elif self.name != "gpt2":
            common |= {"num_key_value_heads": 2}
        config = AutoConfig.for_model(self.name, **{**common, **self.options})
        auto = AutoModelForMaskedLM if self.name == "bert" else AutoModelForCausalLM
        return auto.from_config(config)


def batch(generator: torch.Generator, kind: str, rows: int, length: int = LENGTH) -> dict[str, Any]:
    """``kind`` selects the special tokens of ``rows`` sequences."""
    tokens = torch.randint(1, VOCAB, (rows, length), generator=generator)
    labels = tokens.clone()
    labels[torch.rand(tokens.shape, generator=generator) < 0.3] = -100
    found = {"input_ids": tokens, "labels": labels}
    if kind in ("left", "right"):
        mask = torch.ones_like(tokens)
        for row in range(rows):
            missing = 3 + 4 * row
            place = slice(0, missing) if kind == "left" else slice(length - missing, length)
            mask[row, place] = 0
            labels[row, place] = -100
        found["attention_mask"] = mask
    if kind == "packed":
        begins = [0, 5, 6, 17]
        positions = torch.cat([torch.arange(b - a) for a, b in zip(begins, [*begins[1:], length], strict=True)])
        found["position_ids"] = positions.expand(rows, length)
        found["use_cache"] = False  # with one, transformers does not look for documents
        labels[:, begins] = -100
    if kind == "no labels for some":
        labels[:, : length // 2] = -100
    return found


def rows_of(value: Any, rank: int, size: int) -> Any:
    return value.chunk(size)[rank] if isinstance(value, torch.Tensor) else value


@dataclasses.dataclass(frozen=True)
class Run:
    model: Model
    kind: str = "plain"
    size: int = 1
    """Ranks that share a sequence."""
    mode: str = "auto"
    steps: int = 3
    precision: str = "fp32"
    length: int = LENGTH
    checkpointing: bool | None = None
    """use_reentrant, or None for no checkpointing."""
    accumulate: int = 1
    saved: tuple[Saved, ...] = ()
    """Choices of checkpointed calls, rotated by one call each step; empty: nothing is saved."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def train(run: Run) -> dict[str, Any]:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    data_size, data_rank = world // run.size, rank // run.size
    torch.manual_seed(0)
    config = make_config(run.precision, **{"gradient_clipping": 1.0, "default_chunk_size": 8192, **run.options})
    if run.size > 1:
        config["sequence_parallel"] = {"size": run.size, "mode": run.mode}
    engine, optimizer = initialize_engine(run.model.build, 0, config)
    with engine:
        engine.train()
        if run.checkpointing is not None:
            engine.module.gradient_checkpointing_enable({"use_reentrant": run.checkpointing})
        generator = torch.Generator().manual_seed(1)
        losses, norms = [], []
        for step in range(run.steps):
            optimizer.zero_grad()
            turn = step % max(len(run.saved), 1)
            engine._session.checkpoint_calls.choose(run.saved[turn:] + run.saved[:turn])
            for _ in range(run.accumulate):
                whole = batch(generator, run.kind, BATCH * 2, run.length)
                mine = {key: rows_of(value, data_rank, data_size) for key, value in whole.items()}
                loss = engine(**mine).loss
                engine.backward(loss / run.accumulate)
                losses.append(loss.item())
            optimizer.step()
            norms.append(engine.report()["grad_norm"])
        engine.eval()
        with torch.no_grad():
            ids = batch(generator, "plain", 2, run.length)["input_ids"]
            logits = engine.gather_tokens(engine(input_ids=ids).logits)
        return {
            "losses": losses,
            "norms": norms,
            "logits": logits,
            "state": engine.state_dict(),
            "report": engine.report(),
            "neighbours": getattr(getattr(engine.sequence_group, "heads", None), "size", 1),
        }


def train_all(runs: list[Run]) -> list[dict[str, Any]]:
    return train_in_turn(train, runs)


class OwnAttention(nn.Module):
    """A plain module whose attention is over the engine's sequence group."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, VOCAB)
        self.group = None

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, count: int) -> torch.Tensor:
        hidden = self.embed(tokens)
        q, k, v = self.qkv(hidden).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        if self.group is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = attention(q, k, v, self.group, "ring", causal=True)
        logits = self.out(hidden + mixed.transpose(1, 2).flatten(2))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count


def train_own(size: int) -> dict[str, Any]:
    rank = int(os.environ.get("RANK", 0))
    torch.manual_seed(0)
    config = make_config("fp32", gradient_clipping=1.0, default_chunk_size=2048)
    if size > 1:
        config["sequence_parallel_size"] = size
    engine, optimizer = initialize_engine(OwnAttention, 0, config)
    with engine:
        engine.module.group = engine.sequence_group
        generator = torch.Generator().manual_seed(1)
        norms = []
        for _ in range(5):
            tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
            mine = tokens.chunk(size, dim=1)[rank]
            engine.backward(engine(mine, mine, tokens.numel()))
            optimizer.step()
            norms.append(engine.report()["grad_norm"])
        return {"norms": norms, "state": engine.state_dict()}


def checkpointed(folder: str, size: int) -> dict[str, Any]:
    from patrickstar.checkpoint import latest_tag

    torch.manual_seed(0)
    config = make_config("fp32", gradient_clipping=1.0, default_chunk_size=8192)
    config["sequence_parallel"] = {"size": size, "mode": "ring"}
    engine, optimizer = initialize_engine(Model("llama").build, 0, config)
    with engine:
        generator = torch.Generator().manual_seed(1)
        batches = [batch(generator, "plain", BATCH) for _ in range(4)]
        resumes = latest_tag(folder) is not None
        if resumes:
            engine.load_checkpoint(folder)
        losses = []
        for step in range(2 if resumes else 0, 4):
            if step == 2 and not resumes:
                engine.save_checkpoint(folder)
            loss = engine(**batches[step]).loss
            engine.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return {"losses": losses[-2:], "state": engine.state_dict()}


def go_wrong() -> list[str]:
    from transformers import AutoModelForSequenceClassification

    from tests.models import t5

    rank = int(os.environ["RANK"])

    def message(build: Any, size: int, mode: str = "auto", call: Any = None) -> str:
        config = make_config("fp32")
        config["sequence_parallel"] = {"size": size, "mode": mode}
        try:
            engine, _ = initialize_engine(build, 0, config)
            with engine:
                call(engine)
        except (ValueError, RankFailure) as error:  # the other rank's may have come first
            return str(error)
        raise AssertionError("nothing went wrong")

    def classifier() -> nn.Module:
        model = Model("llama").build()
        model.config.num_labels = 2
        return AutoModelForSequenceClassification.from_config(model.config)

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model("llama").build()
            self.head = nn.Linear(2, 2)

    tokens = torch.randint(1, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    llama = Model("llama").build
    return [
        message(llama, 3),
        message(llama, 4),
        message(t5, 2),
        message(Wrapped, 2),
        message(Model("llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}).build, 2,
                "ulysses", lambda engine: engine(input_ids=tokens)),
        message(llama, 2, call=lambda engine: engine(input_ids=tokens[:, : LENGTH - rank])),
        message(llama, 2, call=lambda engine: engine(input_ids=tokens + rank)),
        message(llama, 2, call=lambda engine: engine(input_ids=tokens, attention_mask=torch.ones(2, 1, 4, 4))),
        message(classifier, 2, call=lambda engine: engine(input_ids=tokens, labels=torch.zeros(2, dtype=torch.int64))),
    ]  # fmt: skip


def two_entry_points() -> list[list[float]]:
    import patrickstar

    results = []
    for options, arguments in (({"sequence_parallel_size": 2}, {}), ({}, {"mesh_param": (1, 2)})):
        torch.manual_seed(0)
        config = {
            "train_batch_size": 2,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "steps_per_print": 0,
            **options,
        }
        data = [
            {"input_ids": torch.arange(i, i + LENGTH) % VOCAB, "labels": torch.arange(i, i + LENGTH) % VOCAB}
            for i in range(8)
        ]
        engine, _, loader, _ = patrickstar.initialize(
            model=Model("llama").build(), config=config, training_data=data, **arguments
        )
        losses = []
        for inputs in loader:
            loss = engine(**inputs).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.close()
        results.append(losses)
    return results
