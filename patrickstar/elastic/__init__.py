"""A number of ranks that changes while a run goes on (docs/guides/elastic.md): samples and batches for any number of
ranks, learning-rate rules, and where old and new ranks meet.
"""

from patrickstar.elastic.batches import BatchDivision, LearningRateRule, divide_batch, learning_rate_factor
from patrickstar.elastic.phases import Membership, Phase, Resized
from patrickstar.elastic.rendezvous import Rendezvous, ResizeError, serve_rendezvous
from patrickstar.elastic.sampler import ElasticLoader, ElasticSampler

__all__ = [
    "BatchDivision",
    "ElasticLoader",
    "ElasticSampler",
    "LearningRateRule",
    "Membership",
    "Phase",
    "Rendezvous",
    "ResizeError",
    "Resized",
    "divide_batch",
    "learning_rate_factor",
    "serve_rendezvous",
]
