"""Reports over audit logs. The only place that imports Spark."""
