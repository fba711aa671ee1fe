"""Models: loading, hooks, and running single layers."""
