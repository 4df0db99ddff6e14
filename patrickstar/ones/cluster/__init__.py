"""The scheduler on a real cluster: a policy's decisions, carried out by Ray (docs/guides/ones.md).

Layers, lower ones first: `submission`, `ledger`, `fleet` → `scheduler` (decides; independent of Ray) →
`rank_process` (one rank) → `ray_ranks` (a job) → `ray_fleet` → `client` (the scheduler's actor, and its commands).
"""
