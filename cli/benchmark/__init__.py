"""What `felix bench` measures and how; the command itself is cli.bench."""
