"""A region's authority and its key hierarchy."""
