"""The store of blocks: keys and values in files, named by the text that they were computed from (docs/cache.md)."""
