"""The engine: one answer, the forward pass for one or several sessions, and the rounds that verify drafts."""
