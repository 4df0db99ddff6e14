"""Lightning: ``Trainer(strategy="patrickstar")`` or ``PatrickStarStrategy(config)`` (docs/guides/lightning.md).

    import patrickstar.integrations.lightning  # registers the name
    trainer = Trainer(strategy="patrickstar", precision="bf16-mixed", gradient_clip_val=1.0)

It supports the packages ``lightning`` and ``pytorch_lightning``, two copies of the same classes. It uses the one that
is imported already, else the first that is installed.
"""

from patrickstar.integrations.lightning.package import pl
from patrickstar.integrations.lightning.precision import PatrickStarPrecision
from patrickstar.integrations.lightning.preemption import Preemption
from patrickstar.integrations.lightning.strategy import AfterRun, CheckpointFormat, ModuleInit, PatrickStarStrategy

__all__ = ["AfterRun", "CheckpointFormat", "ModuleInit", "PatrickStarPrecision", "PatrickStarStrategy", "Preemption"]

PatrickStarStrategy.register_strategies(pl.strategies.StrategyRegistry)
