"""The scheduler on a real cluster: decisions of a policy, carried out by Ray (docs/guides/ones.md).

Layers inside, lower ones first: `submission`, `ledger`, `fleet` → `scheduler` (decides; knows no Ray) → `ray_ranks`
(processes) → `ray_fleet` → `client` (the actor that schedules, and how commands reach it).
"""
