"""Fates: what becomes of evicted entries. One file for each."""
