"""``kvkeep serve``: options, address, defaults, and the server in one process or in replicas."""
