"""Parts of ``pretrain_gpt.py``. :class:`Pretraining` is a training run as a program uses it:

training = Pretraining(lambda: build_model(shape), TrainingOptions(gpu_memory="24GiB"))
loss = training.step(batch)
"""

from .options import TrainingOptions
from .training import Pretraining

__all__ = ["Pretraining", "TrainingOptions"]
