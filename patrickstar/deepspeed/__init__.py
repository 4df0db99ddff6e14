"""The engine of ``patrickstar.initialize``: counts micro-batches and steps, schedules learning rates, writes logs.

Names and meaning are DeepSpeed's, so that its scripts run. :class:`patrickstar.engine.engine.Engine` below it knows
nothing of DeepSpeed.
"""

from patrickstar.deepspeed.arguments import add_config_arguments
from patrickstar.deepspeed.engine import TrainingEngine
from patrickstar.deepspeed.initialize import initialize

__all__ = ["TrainingEngine", "add_config_arguments", "initialize"]
