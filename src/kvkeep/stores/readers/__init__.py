"""How a layer attends to entries that are not resident: to all, to some pages, or to none in passes that draft."""
