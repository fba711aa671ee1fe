"""``kvkeep chat``: lines and commands without terminal code, and the screen."""
