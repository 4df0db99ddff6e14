"""PatrickStar under other libraries' training loops: one module per library."""
