"""The checks of ``python -m patrickstar.env``."""
