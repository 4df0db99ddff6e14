"""Command line of the proofs: ``python -m proofs --help``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

from proofs import results
from proofs.cases import Proof
from proofs.runner import Options, holds, run

NAMES = ("io", "memory", "crash", "interrupts", "flips", "ranks", "races", "soak")
_PREPARED = "PATRICKSTAR_PROOF"  # set in a process with the proof's environment


def proof_of(name: str) -> Proof:
    """The proof of a name."""
    return importlib.import_module(f"proofs.{name}").PROOF


def enter(proof: Proof) -> None:
    """Sets the proof's environment; begins this process again if something must be there from the start."""
    if os.environ.get(_PREPARED) == proof.name:
        return
    own = dict(proof.environment())
    folder = own.pop("PATRICKSTAR_PROOF_TREE", None)
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", _PREPARED: proof.name, **own}
    os.environ.update(variables, PATRICKSTAR_PROOF_COMMIT=results.commit())
    if folder is not None:
        os.chdir(folder)
    if own:
        os.execv(sys.executable, [sys.executable, "-m", "proofs", *sys.argv[1:]])


def main() -> None:
    """Parses the command line; exits with 1 if the proof fails."""
    parser = argparse.ArgumentParser(prog="python -m proofs", description="Runs a proof of reliability.")
    parser.add_argument("name", choices=[*NAMES, "table"], help="a proof; table: writes the results' table")
    parser.add_argument("--minutes", type=float, default=15.0, help="time for points; default 15")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time; default 2")
    parser.add_argument("--seed", type=int, default=0, help="first seed of random points; default 0")
    parser.add_argument("--points", type=int, help="most points of each case")
    parser.add_argument("--planted", type=int, help="most planted bugs")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the result, NAME.json")
    parsed = parser.parse_args()
    parsed.out = parsed.out.absolute()
    if parsed.name == "table":
        from proofs import table

        table.write()
        return
    proof = proof_of(parsed.name)
    sys.argv += ["--out", str(parsed.out)]
    enter(proof)
    options = Options(parsed.minutes, parsed.jobs, parsed.seed, parsed.points, parsed.planted, parsed.only)
    began = time.time()
    found, tried = run(proof, options)
    well = holds(found, tried)
    file = results.write(proof, options, began, found, tried, well, parsed.out)
    num_points, num_found = sum(case["points"] for case in tried), sum(bool(each["found"]) for each in found)
    print(f"{proof.name}: {num_points} {proof.points}, {num_found} of {len(found)} planted bugs found; {file}")
    print("holds" if well else "FAILS")
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
