"""Entries that attention reads as they are: chosen by a selector, the newest, or all of them in blocks."""
