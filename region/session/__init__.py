"""A client's session at a broker: who may ask what, and what is answered."""
