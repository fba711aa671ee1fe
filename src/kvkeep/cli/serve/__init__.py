"""``kvkeep serve``: what is asked for, where it listens, and one process or replicas that answer there."""
