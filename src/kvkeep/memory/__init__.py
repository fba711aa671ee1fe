"""Memory: rows of tensors in order of arrival, their places, the ledger of tokens, and measured bytes."""
