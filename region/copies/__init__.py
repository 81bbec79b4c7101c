"""One of several brokers: its copies of logs, its links to the others, and what they ask each other."""
