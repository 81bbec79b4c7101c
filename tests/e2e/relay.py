"""A UDP relay that writes down every datagram, for tests that look at what is on the wire between two processes."""

from __future__ import annotations

import selectors
import socket
import threading

BUFFER_BYTES = 8 << 20
"""A burst must not be lost here because this thread was late."""
DATAGRAM_BYTES_MAX = 65_536


class Relay:
    """Forwards between clients and one target on 127.0.0.1; each client gets a socket of its own. `close` ends it."""

    def __init__(self, target_port: int) -> None:
        self.datagrams: list[bytes] = []
        self._target = ("127.0.0.1", target_port)
        self._front = self._socket()
        self._front.bind(("127.0.0.1", 0))
        self.port: int = self._front.getsockname()[1]
        self._backs: dict[tuple[str, int], socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._front, selectors.EVENT_READ, None)
        self._over = False
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    @staticmethod
    def _socket() -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        made.setblocking(False)
        return made

    @property
    def size_bytes(self) -> int:
        """Of everything that came by."""
        return sum(map(len, self.datagrams))

    def _run(self) -> None:
        while not self._over:
            for key, _ in self._selector.select(timeout=0.1):
                try:
                    self._pump(key.fileobj, key.data)  # type: ignore[arg-type]
                except OSError:
                    continue  # nobody listens at the other end just now

    def _pump(self, ready: socket.socket, client: tuple[str, int] | None) -> None:
        while True:
            try:
                data, sender = ready.recvfrom(DATAGRAM_BYTES_MAX)
            except BlockingIOError:
                return
            self.datagrams.append(data)
            if client is not None:
                self._front.sendto(data, client)
                continue
            back = self._backs.get(sender)
            if back is None:
                back = self._backs[sender] = self._socket()
                back.bind(("127.0.0.1", 0))
                self._selector.register(back, selectors.EVENT_READ, sender)
            back.sendto(data, self._target)

    def close(self) -> None:
        self._over = True
        self._thread.join()
        for held in (self._front, *self._backs.values()):
            held.close()
        self._selector.close()
