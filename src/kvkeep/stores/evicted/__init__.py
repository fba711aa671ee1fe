"""Stores of evicted entries: groups of codes, tiers, sketches, merged entries."""
