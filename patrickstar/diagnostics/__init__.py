"""What ``python -m patrickstar.env`` finds out."""
