"""The region's audit log as its brokers have it: written here or asked for elsewhere, copied, witnessed, and what is known of it."""
