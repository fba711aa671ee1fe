"""The planner: what every method would hold and how long it would take, before anything is loaded."""
