"""``kvkeep chat``: a loop free of the terminal, its commands as a table, and the screen it is shown on."""
