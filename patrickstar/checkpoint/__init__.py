"""Checkpoints: whole runs, saved and loaded by any number of ranks, without pickle (docs/checkpoints.md)."""

from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.folder import latest_tag, tags
from patrickstar.checkpoint.peers import GroupPeers, OneRank, Peers
from patrickstar.checkpoint.reader import Checkpoint
from patrickstar.checkpoint.shards import ShardSink, ShardSource, TensorRange, TensorShard
from patrickstar.checkpoint.writer import SaveOptions, save

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "GroupPeers",
    "OneRank",
    "Peers",
    "SaveOptions",
    "ShardSink",
    "ShardSource",
    "TensorRange",
    "TensorShard",
    "latest_tag",
    "save",
    "tags",
]
