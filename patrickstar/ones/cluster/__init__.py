"""The scheduler on a real cluster: a policy's decisions, carried out by Ray (docs/guides/ones.md).

Layers, lower ones first: `submission`, `ledger`, `fleet` → `scheduler` (decides; independent of Ray) → `ray_ranks`
(processes) → `ray_fleet` → `client` (the scheduler's actor, and its commands).
"""
