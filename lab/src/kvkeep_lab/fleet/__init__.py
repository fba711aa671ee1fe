"""A simulation of a fleet of replicas (``kvkeep lab fleet``)."""
