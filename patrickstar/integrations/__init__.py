"""PatrickStar inside other libraries' trainers: one module for each, imported by name."""
