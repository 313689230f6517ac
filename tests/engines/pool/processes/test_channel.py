"""Messages arrive whole and in order; an end that is gone and a line without end are noticed."""

from __future__ import annotations

import socket

import pytest

from coresident.engines.pool.processes.channel import LINE_LIMIT, Channel, Closed, line, pair
from coresident.errors import InternalError


def both() -> tuple[Channel, Channel]:
    ours, theirs = pair()
    return ours, Channel(theirs)


def test_messages_arrive_in_order_however_they_are_cut() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    sent = line("one", value=1) + line("two", value=[None, 2.5]) + line("three")
    for place in range(0, len(sent), 7):
        theirs.sendall(sent[place : place + 7])
    heard = [channel.hear() for _ in range(3)]
    assert heard == [{"event": "one", "value": 1}, {"event": "two", "value": [None, 2.5]}, {"event": "three"}]


def test_what_a_peer_said_before_it_went_is_heard_first() -> None:
    ours, theirs = both()
    theirs.tell("last", words=True)
    theirs.close()
    assert ours.hear()["event"] == "last"
    with pytest.raises(Closed):
        ours.hear()
    with pytest.raises(Closed):
        ours.tell("anybody?")


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    theirs.setblocking(False)
    with pytest.raises(InternalError, match="more than"):
        for _ in range(10):
            theirs.send(b"x" * LINE_LIMIT)
            channel.pending()


def test_a_message_that_could_not_be_read_is_not_sent() -> None:
    ours, _theirs = both()
    with pytest.raises(InternalError, match="bytes long"):
        ours.tell("failed", reason="x" * LINE_LIMIT)
    with pytest.raises(ValueError, match="Out of range float"):
        ours.tell("learned", loss=float("nan"))


@pytest.mark.parametrize("garbage", [b"not json\n", b"[1, 2]\n", b'{"no": "event"}\n'])
def test_what_is_no_message_is_our_bug(garbage: bytes) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(garbage)
    with pytest.raises(InternalError, match="a pool process sent"):
        Channel(ours).hear()
