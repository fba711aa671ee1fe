"""Stores: a layer, its resident entries, what it keeps of evicted ones, and their readers."""
