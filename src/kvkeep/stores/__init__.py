"""Stores: a layer, its resident entries, its store of evicted entries, and their readers."""
