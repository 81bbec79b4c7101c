"""Queues: the second view of a stream. Records are leased to workers one by one, and gone once they are acknowledged."""
