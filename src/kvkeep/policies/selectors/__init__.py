"""Who leaves: one file for each selector."""
