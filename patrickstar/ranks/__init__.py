"""Ranks of a run: their groups, what they tell each other, what happens when one fails."""
