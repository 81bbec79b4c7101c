"""The cache: the latest value of every key of a compacted stream, kept in memory as the log says.

`keys`, `records` and `state` are pure; `shard` follows one shard's log and appends what was decided; `service` answers calls,
`watch` tells changes. The log is the only truth: whatever writes to the stream writes to the cache.
"""
