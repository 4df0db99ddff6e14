"""Writes whole runs, with optimizer states, in formats that other programs resume."""

from patrickstar.checkpoint.runs.export import RunFormat, export_run, export_stored_run
from patrickstar.checkpoint.runs.run import Run

__all__ = ["Run", "RunFormat", "export_run", "export_stored_run"]
