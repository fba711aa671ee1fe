"""The planner: predicts the bytes and seconds of every method before a model is loaded."""
