"""Fates: how evicted entries are stored. One file for each."""
