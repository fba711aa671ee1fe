"""The names of places of checkpoints, which need no torch to be looked at."""

PLACES = ("device", "host", "disk")
