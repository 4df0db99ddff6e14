"""Experts that ranks divide: their forward, and the exchange of tokens."""
