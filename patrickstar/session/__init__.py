"""One engine's live state, and what runs in it: forward, backward, optimizer step, opening and closing."""
