"""A fleet of replicas, simulated (``kvkeep lab fleet``)."""
