"""The felix command: the only place that wires parts together."""
