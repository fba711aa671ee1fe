"""How entries come back: one file for each recall."""
