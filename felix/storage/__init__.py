"""Files: one port, the disk behind it, and a twin in memory that loses what was not synced."""
