"""How a broker is opened: what it needs, in order, each part made with what it needs of those before it.

`broker.open_broker` goes through the steps: `ground` (the data folder, and who the region is), `metadata` (the store, its keys, the other brokers), `evidence` (the
audit log), `serving` (streams, and links to other brokers), `governing` (what may cross). Each gives what it opened as one value.

Invariants: nothing is served before the metadata store has proved to be this region's; what was opened is on the stack, which closes it in
the reverse order, whatever fails.
"""
