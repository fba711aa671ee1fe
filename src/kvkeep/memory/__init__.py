"""Memory: rows of tensors that arrive in order, where they live, what came in, and how many bytes that is."""
