"""What the views of a stream (queues, subscriptions, transactions) have in common."""
