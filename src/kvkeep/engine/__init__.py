"""The engine: one answer, the forward pass for one or several sessions, and drafts of the next tokens."""
