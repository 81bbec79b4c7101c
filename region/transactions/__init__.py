"""Transactions: publishes into several shards, and consumers' acknowledgements, that become visible together or not at all."""
