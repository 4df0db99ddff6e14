"""The user's objects: ``Engine``, its optimizer, and the functions that make them."""
