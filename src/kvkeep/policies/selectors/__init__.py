"""Selectors: which entries are evicted. One file for each."""
