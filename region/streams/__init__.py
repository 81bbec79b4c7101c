"""A broker's streams: which ones it has, how each is served, kept within its settings, sealed and erased."""
