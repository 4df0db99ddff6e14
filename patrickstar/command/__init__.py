"""The command ``patrickstar``: one subcommand per task, with common flags (docs/guides/command.md)."""
