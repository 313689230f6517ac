"""A handle travels as plain values, and none that does not fit the base is opened."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from coresident.engines.pool.processes.channel import pair
from coresident.engines.pool.sharing import ipc
from coresident.errors import InternalError


def handle(**changes: Any) -> dict[str, Any]:
    told: dict[str, Any] = {
        "size": 4096,
        "tensor_offset": 0,
        "handle": base64.b64encode(bytes(range(65))).decode(),
        "storage_size": 4096,
        "storage_offset": 512,
        "counter": base64.b64encode(b"/torch_1_2_3").decode(),
        "counter_offset": 7,
        "signal": base64.b64encode(bytes(64)).decode(),
        "signal_sync": True,
    }
    return told | changes


def test_a_handle_survives_the_channel() -> None:
    ours, theirs = pair()
    with theirs:
        ours.tell("base", **handle())
        from coresident.engines.pool.processes.channel import Channel

        heard = Channel(theirs).hear()
    values = ipc.checked(heard, 4096)
    assert values["handle"] == bytes(range(65))
    assert (values["counter"], values["counter_offset"], values["storage_offset"]) == (
        b"/torch_1_2_3",
        7,
        512,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"size": 8192},
        {"storage_size": 4095},
        {"tensor_offset": 8},
        {"handle": "not base64!"},
        {"storage_offset": -1},
        {"counter_offset": "7"},
        {"storage_size": True},
        {"signal_sync": "yes"},
    ],
)
def test_a_handle_that_does_not_fit_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InternalError, match="a handle that cannot be used"):
        ipc.checked(handle(**changes), 4096)


def test_a_handle_with_something_missing_is_refused() -> None:
    told = handle()
    del told["signal"]
    with pytest.raises(InternalError, match="a handle that cannot be used"):
        ipc.checked(told, 4096)
