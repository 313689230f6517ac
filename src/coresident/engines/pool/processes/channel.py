"""How the processes of one pool talk: one JSON object a line over an inherited socket.

Lines are bounded, so that a reader's memory is too; a peer that is gone shows as the end of the stream, never
as silence.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

from coresident.errors import InternalError

LINE_LIMIT = 65536
# What an order or a message may quote of an error, so that a whole line always fits.
REASON_LIMIT = 4000


class Closed(Exception):  # noqa: N818 - the peer is gone: often expected
    """The other side is gone."""


class Channel:
    """One end of a conversation."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._rest = b""

    @classmethod
    def inherited(cls, descriptor: int) -> Channel:
        """The end that this process was started with."""
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        """The descriptor, to wait on or to write a prepared line to."""
        return self._socket.fileno()

    def tell(self, event: str, **values: Any) -> None:
        """Send one line. Raises `Closed` if nobody listens any more."""
        try:
            self._socket.sendall(line(event, **values))
        except OSError:
            raise Closed from None

    def hear(self) -> Mapping[str, Any]:
        """The next line, waiting for it. Raises `Closed` at the end of the stream."""
        while b"\n" not in self._rest:
            self._more()
        return self._take()

    def pending(self) -> list[Mapping[str, Any]]:
        """All lines that one read gives, perhaps none; for a descriptor that is ready. Raises `Closed` at the
        end.
        """
        self._more()
        found = []
        while b"\n" in self._rest:
            found.append(self._take())
        return found

    def close(self) -> None:
        """Hang up: the other side sees the end of the stream."""
        self._socket.close()

    def _more(self) -> None:
        try:
            part = self._socket.recv(LINE_LIMIT)
        except OSError:
            raise Closed from None
        if not part:
            raise Closed
        self._rest += part
        if b"\n" not in self._rest and len(self._rest) > LINE_LIMIT:
            raise InternalError(f"a pool process sent a line of more than {LINE_LIMIT} bytes")

    def _take(self) -> Mapping[str, Any]:
        first, self._rest = self._rest.split(b"\n", 1)
        try:
            message = json.loads(first)
        except ValueError:
            raise InternalError(f"a pool process sent {first[:80]!r}, which is not JSON") from None
        if not isinstance(message, dict) or not isinstance(message.get("event"), str):
            raise InternalError(f"a pool process sent {first[:80]!r}, which is no event")
        return message


def wait_for(channel: Channel, order: str) -> Mapping[str, Any]:
    """The next line, which is `order`. Raises `Closed` at the end of the stream."""
    heard = channel.hear()
    if heard["event"] != order:
        raise InternalError(f"a pool process waiting for {order!r} was told {heard['event']!r}")
    return heard


def line(event: str, **values: Any) -> bytes:
    """The bytes of one message."""
    text = json.dumps({"event": event, **values}, allow_nan=False).encode() + b"\n"
    if len(text) > LINE_LIMIT:
        raise InternalError(f"the message {event!r} is {len(text)} bytes long, more than {LINE_LIMIT}")
    return text


def pair() -> tuple[Channel, socket.socket]:
    """A driver's end, and the socket that the other process is to inherit."""
    ours, theirs = socket.socketpair()
    return Channel(ours), theirs
