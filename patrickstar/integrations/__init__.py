"""PatrickStar under other libraries' training loops: one module for each, imported by those who use that library."""
