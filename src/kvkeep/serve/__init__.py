"""Many conversations in one model and one budget of memory, each as if it were alone."""
