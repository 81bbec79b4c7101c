"""A region: log, broker, metadata, ingest."""
