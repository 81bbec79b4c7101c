"""A region of several brokers: its records in the metadata store, what changes them, and who leads which shard."""
