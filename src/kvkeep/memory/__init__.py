"""Memory: rows of tensors in order of arrival, their places, the ledger of tokens, and measured bytes."""

PLACES = ("device", "host", "disk")
"""Places of checkpoints: on the model's device, in host memory, or in memory-mapped files on disk."""
