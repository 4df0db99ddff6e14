"""An engine: one step in the order in which it happens, from the model's way in to its way out."""
