"""Elastic training (docs/guides/elastic.md): samples and batches for any number of ranks, learning-rate rules, the
rendezvous of old and new ranks, and a run that follows orders of the process that started it.
"""

from patrickstar.elastic.batches import (
    BatchDivision,
    BatchRange,
    LearningRateRule,
    MicroBatches,
    divide_batch,
    job_batch,
    learning_rate_factor,
)
from patrickstar.elastic.gradient_noise import GradientNoise, GradientParts
from patrickstar.elastic.orders import Order, OrderKind, Orders, Outcome, OutcomeKind, RunReport
from patrickstar.elastic.phases import Membership, Next, Recovered, RecoverySource, Resized, ResizePhase
from patrickstar.elastic.rendezvous import Rendezvous, ResizeError, serve_rendezvous
from patrickstar.elastic.run import ElasticRun
from patrickstar.elastic.sampler import ElasticLoader, ElasticSampler
from patrickstar.elastic.scaled_rates import ScaledRates
from patrickstar.elastic.survival import Redundancy
from patrickstar.ranks.run_secret import SecretError

__all__ = [
    "BatchDivision",
    "BatchRange",
    "ElasticLoader",
    "ElasticRun",
    "ElasticSampler",
    "GradientNoise",
    "GradientParts",
    "LearningRateRule",
    "Membership",
    "MicroBatches",
    "Next",
    "Order",
    "OrderKind",
    "Orders",
    "Outcome",
    "OutcomeKind",
    "ResizePhase",
    "Recovered",
    "RecoverySource",
    "Redundancy",
    "Rendezvous",
    "ResizeError",
    "Resized",
    "RunReport",
    "ScaledRates",
    "SecretError",
    "divide_batch",
    "job_batch",
    "learning_rate_factor",
    "serve_rendezvous",
]
