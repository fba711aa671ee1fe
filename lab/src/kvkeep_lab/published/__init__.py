"""Methods from papers, for comparison. They are a plugin: lab/pyproject.toml lists them as entry points
``kvkeep.parts``."""
