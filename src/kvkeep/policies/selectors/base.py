"""What selectors have in common."""

STAYS = float("inf")
"""The rank of an entry that does not leave."""
