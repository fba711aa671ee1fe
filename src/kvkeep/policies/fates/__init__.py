"""What becomes of entries that leave: one file for each fate."""
