"""What a device cannot do is refused before anything starts, each with what to do instead."""

from __future__ import annotations

from typing import Any

import pytest

from coresident.engines.pool.card import device_rules
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.workload import dpo
from coresident.errors import UserError

CARD = "GPU-1"


def asked(**values: Any) -> DPO:
    return DPO.model_validate(values)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("sharing", ["fork", "fork-copy"])
def test_expandable_segments_are_refused_where_memory_is_exported(
    sharing: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:128,expandable_segments:True")
    with pytest.raises(UserError, match="expandable segments") as caught:
        dpo.inspect(asked(sharing=sharing))
    assert name in caught.value.remedy
    device_rules.check(asked(sharing="none"))
    monkeypatch.setenv(name, "expandable_segments:False")
    device_rules.check(asked(sharing=sharing))


@pytest.mark.parametrize(("sharing", "most"), [("none", 48), ("fork", 47)])
def test_mps_clients_are_counted_with_the_golden_process(sharing: str, most: int) -> None:
    device_rules.check(asked(mps="on", sharing=sharing, learners=most))
    with pytest.raises(UserError, match=r"makes 49 clients, and MPS serves 48") as caught:
        device_rules.check(asked(mps="on", sharing=sharing, learners=most + 1))
    assert f"at most {most} learners" in caught.value.remedy
    device_rules.check(asked(mps="on", sharing=sharing, learners=100, schedule="solo"))


def test_a_file_cannot_be_mapped_on_a_card() -> None:
    device_rules.check_on(asked(sharing="mapped"), "cpu")
    with pytest.raises(UserError, match="nothing to map on a CUDA device"):
        device_rules.check_on(asked(sharing="mapped"), CARD)


@pytest.mark.parametrize("values", [{"mps": "on"}, {"device_memory": "1GiB"}])
def test_what_is_about_a_card_is_refused_on_the_cpu(values: dict[str, str]) -> None:
    with pytest.raises(UserError, match="is about a CUDA device"):
        device_rules.check_on(asked(**values), "cpu")
    device_rules.check_on(asked(**values), CARD)
