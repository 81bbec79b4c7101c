"""What both ends of the wire share, and the client SDK."""
