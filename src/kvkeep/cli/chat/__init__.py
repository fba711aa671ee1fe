"""``kvkeep chat``: a loop without terminal code, a table of commands, and the screen."""
