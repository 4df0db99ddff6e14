from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.utils.data import Sampler
from trl import SFTConfig, SFTTrainer

from patrickstar.elastic import ElasticSampler, serve_rendezvous
from patrickstar.integrations.elastic_trainer import ElasticTrainerMixin, ElasticTraining, LeftRun
from tests.distributed import run_ranks
from tests.elastic.test_trainer import environment, logged
from tests.elastic.trainer_runs import OneOrder
from tests.integrations.trl_runs import llama, options, prompts, sentences, tokenizer

NUM_SAMPLES, GLOBAL_BATCH, SEED = 36, 12, 42


class ElasticSFTTrainer(ElasticTrainerMixin, SFTTrainer):
    pass


class InOrder(Sampler[int]):
    def __init__(self):
        self._sampler = ElasticSampler(NUM_SAMPLES, GLOBAL_BATCH, GLOBAL_BATCH, SEED)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        for batch in self._sampler:
            yield from batch
        self._sampler.next_epoch()


class PlainSFTTrainer(SFTTrainer):
    def _get_train_sampler(self, *_: Any) -> InOrder:
        return InOrder()


def make(cls: Any, folder: str, accumulation: int, **own: Any) -> Any:
    data = Dataset.from_dict({"prompt": prompts(NUM_SAMPLES, 20, 1), "completion": sentences(NUM_SAMPLES, 9, 2)})
    more = {"max_steps": 6, "gradient_accumulation_steps": accumulation, "seed": SEED}
    args = SFTConfig(**options(Path(folder)) | more, max_length=32)
    return cls(
        llama(), args, train_dataset=data, eval_dataset=data.select(range(6)), processing_class=tokenizer(), **own
    )


def follow_orders(address: str, folder: str) -> list[dict[str, float]] | None:
    torch.set_num_threads(1)
    trainer = make(
        ElasticSFTTrainer,
        folder,
        1,
        elastic=ElasticTraining(
            global_batch=GLOBAL_BATCH, look_seconds=1e-9, rendezvous=address, resize_options={"folder": folder}
        ),
        patrickstar_config={"default_chunk_size": 8192, "rank_timeout_seconds": 60},
        callbacks=[OneOrder(address, {2: 2, 4: 1})],
    )
    try:
        trainer.train()
    except LeftRun:
        return None
    history = trainer.state.log_history
    trainer.close()
    return history


@pytest.mark.slow
def test_losses_are_those_of_one_rank(tmp_path):
    store = serve_rendezvous("127.0.0.1", 0)
    results = run_ranks(2, follow_orders, f"127.0.0.1:{store.port}", str(tmp_path), environment=environment)
    (history,) = [result for result in results if result is not None]
    plain = make(PlainSFTTrainer, str(tmp_path), GLOBAL_BATCH // 2)
    plain.train()
    for key in ("loss", "grad_norm", "learning_rate", "eval_loss", "num_tokens"):
        expected = logged({"history": plain.state.log_history}, key)
        assert expected
        assert logged({"history": history}, key) == pytest.approx(expected, rel=2e-4)
