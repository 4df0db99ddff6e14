"""Proofs of reliability that anyone can repeat: ``python -m proofs crash --minutes 15`` (``make prove-crash``).

A proof injects faults at many points and looks after each at what is promised. It also plants bugs in the code under
test, and fails unless it finds each of them. docs/reliability.md has the claims and the last results.

    python -m proofs io --minutes 60      # longer than the default of 15 minutes
    python -m proofs races --seed 20000   # other points
    python -m proofs table                # docs/reliability.md from the recorded results
"""
