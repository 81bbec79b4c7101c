"""What the region has agreed to: documents taken, judged by, and written into the audit log. `service` is what others import."""
