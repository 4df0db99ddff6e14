"""The ranks of a run: groups, messages and failures."""
