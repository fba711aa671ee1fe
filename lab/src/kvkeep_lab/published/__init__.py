"""Methods that are compared with papers, as a plugin: the entry points ``kvkeep.parts`` in lab/pyproject.toml name
them."""
