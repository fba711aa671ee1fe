"""How a layer attends to entries that are not resident: to all, to some pages, or in rounds of draft and verify."""
