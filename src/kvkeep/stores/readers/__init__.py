"""How a layer attends to what is not resident: all of it, some pages, or in rounds of draft and verify."""
