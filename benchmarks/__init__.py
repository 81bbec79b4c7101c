"""Measurements that stand in the clone alone: beside other systems, of tenants beside each other, and of single parts."""
