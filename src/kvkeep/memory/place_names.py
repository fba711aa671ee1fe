"""The names of places of checkpoints, in a module that does not import torch."""

PLACES = ("device", "host", "disk")
