"""A job with Hugging Face's Trainer; each process writes its samples, rank 0 the final state.

python trainer_script.py FOLDER NUM_STEPS STEP_SECONDS

Steps take STEP_SECONDS until FOLDER has a file `hurry`.
"""

import json
import sys
import time
from pathlib import Path

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from patrickstar.integrations.elastic_trainer import ElasticTraining
from tests.elastic.trainer_runs import GLOBAL_BATCH, OPTIONS, ElasticTracing, data
from tests.integrations.trainer_runs import arguments, engine_config, gpt2
from tests.ones.seen import Notes


class Report(TrainerCallback):
    def __init__(self, folder: Path, step_seconds: float):
        self.notes, self.step_seconds, self.trainer = Notes(folder), step_seconds, None
        self.hurry = folder / "hurry"

    def on_step_end(self, args, state, control, **_):
        if not self.hurry.exists():
            time.sleep(self.step_seconds)
        step = state.global_step - 1
        self.notes.add(step, 0, None, self.trainer.seen[step])


def main(folder, num_steps, step_seconds):
    torch.set_num_threads(1)
    options = OPTIONS | {"eval_strategy": "no", "max_steps": num_steps, "save_strategy": "steps", "save_steps": 20}
    report = Report(folder, step_seconds)
    trainer = ElasticTracing(
        gpt2(),
        arguments(folder / "trainer", **options),
        elastic=ElasticTraining(global_batch=GLOBAL_BATCH, look_seconds=0.1),
        patrickstar_config=engine_config(device_memory=800_000),
        callbacks=[report],
        **data(),
    )
    report.trainer = trainer
    last = get_last_checkpoint(trainer.args.output_dir) if (folder / "trainer").exists() else None
    trainer.train(resume_from_checkpoint=last)
    values = {name: value.tolist() for name, value in trainer.engine.state_dict().items()}
    if trainer.is_world_process_zero():
        (folder / "result.json").write_text(json.dumps({"num_steps": trainer.state.global_step, "values": values}))
    trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
