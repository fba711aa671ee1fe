"""Recalls: how evicted entries come back. One file for each."""
