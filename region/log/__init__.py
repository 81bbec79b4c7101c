"""The log of a shard: segments on disk, the ring in memory, recovery, retention, producers' sequences."""
