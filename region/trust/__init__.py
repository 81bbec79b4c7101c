"""Whom a region trusts, and by which keys it speaks: bundles of other regions, and the region's own signing and log keys as its folder, its store and its log know them."""
