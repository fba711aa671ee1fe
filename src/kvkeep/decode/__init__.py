"""Generating: prompts, answers as they come, and what they cost."""
