"""The planner: the bytes of every method before a weight is loaded."""
