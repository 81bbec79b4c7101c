"""A region's metadata: the store port, its three stores, genesis, catalog and the live mirror."""
