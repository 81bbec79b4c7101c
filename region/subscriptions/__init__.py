"""Durable subscriptions: named positions in a stream that consumers share. `progress` and `group` decide, without I/O; `store`
keeps progress in journals; `subscription`, `consumer` and `service` act."""
