"""QUIC transport: one port (`port`), two engines behind it (`native`, `portable`), one driver for both.

Only this package imports a QUIC library. Everything above it codes against `felix.transport.port`.
"""
