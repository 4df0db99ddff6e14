"""Linear layers whose products run in 8-bit floating point."""
