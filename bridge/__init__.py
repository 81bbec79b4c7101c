"""The bridge agent: the only way from region to region."""
