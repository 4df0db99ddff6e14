"""Benchmarks: every figure this project states comes from here."""
