"""Models: loading them, and running parts of them."""
