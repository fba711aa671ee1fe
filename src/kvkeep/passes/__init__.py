"""Forward passes: what a model's hooks call, how one cache takes part, and what it knows of its text."""
