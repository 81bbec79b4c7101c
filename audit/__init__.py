"""The append-only, verifiable record of every crossing."""
