"""Replication of a shard: what its leader and its followers decide, as pure cores. Nothing of a running broker uses it yet."""
