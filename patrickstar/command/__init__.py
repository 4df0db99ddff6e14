"""The command ``patrickstar``: a word for each thing that it does, one vocabulary of flags (docs/guides/command.md)."""
