"""The two ends of a link at a broker: what leaves, what arrives, and what has arrived without its leaf yet."""
