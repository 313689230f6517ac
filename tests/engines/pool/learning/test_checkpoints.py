"""A learner's state: put back, it goes on bit for bit; what belongs to something else is refused; a failed write loses
nothing.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from coresident.engines.pool.base import base, identity
from coresident.engines.pool.learning import checkpoints, outputs
from coresident.engines.pool.learning.adapter import adapter_tensors, digest
from coresident.engines.pool.learning.learner import Learner
from coresident.engines.pool.learning.tokenized import Tokenized, TokenPair
from coresident.errors import MachineError, UserError

BELONGS = {"base": "host 1", "beta": "0.1"}


@pytest.mark.parametrize("reference", ["each-step", "precomputed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_learner_goes_on_bit_for_bit(
    build: Any, settings: Any, docs_batches: Any, tmp_path: Path, dtype: str, reference: str
) -> None:
    settings = settings.model_copy(update={"dtype": dtype, "reference": reference})
    batches = docs_batches(settings)
    whole = Learner(build(settings), batches, settings)
    for step in range(settings.steps):
        if step == 2:
            checkpoints.save(tmp_path / "deep" / "state.safetensors", whole, BELONGS)
        whole.step()
    again = Learner(build(settings), batches[2:], settings)
    checkpoints.restore(tmp_path / "deep" / "state.safetensors", again, BELONGS)
    assert again.steps == outputs.steps_of(tmp_path / "deep" / "state.safetensors") == 2
    while again.steps < settings.steps:
        again.step()
    assert again.series == whole.series
    assert digest(adapter_tensors(again.model)) == digest(adapter_tensors(whole.model))


def test_what_belongs_to_something_else_is_refused(
    build: Any, settings: Any, docs_batches: Any, tmp_path: Path
) -> None:
    learner = Learner(build(settings), docs_batches(settings), settings)
    learner.step()
    file = tmp_path / "state.safetensors"
    checkpoints.save(file, learner, BELONGS)
    for changed, said in (
        ({"base": "host 2"}, "the base has changed since"),
        ({"base": "card 1"}, "it was made on another kind of device"),
        ({"beta": "0.2"}, "beta was 0.1 and is now 0.2"),
    ):
        with pytest.raises(UserError, match=said):
            checkpoints.restore(file, learner, BELONGS | changed)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match="is no checkpoint of ours"):
        checkpoints.restore(file, learner, BELONGS)


def test_one_flipped_bit_in_any_tensor_is_refused_and_a_state_without_a_checksum_is_read(
    tmp_path: Path,
) -> None:
    file = tmp_path / "state.safetensors"
    learned = {"adapter.a": torch.ones(2, 3, dtype=torch.bfloat16), "optimizer.step.a": torch.tensor(2.0)}
    checkpoints.write(file, learned, {"loss": [0.5, 0.25], "margin": []}, BELONGS)
    before, content = checkpoints.read(file, BELONGS), file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    for at in range(start, len(content)):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        with pytest.raises(
            UserError, match=r"state\.safetensors is damaged: its tensors have another checksum"
        ):
            checkpoints.read(file, BELONGS)
    save_file(before, file, metadata={"coresident": json.dumps(BELONGS)})
    again = checkpoints.read(file, BELONGS)
    assert again.keys() == before.keys()
    assert all(torch.equal(again[name], one) for name, one in before.items())


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    build: Any, settings: Any, docs_batches: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner(build(settings), docs_batches(settings), settings)
    learner.step()
    file = tmp_path / "state.safetensors"
    checkpoints.save(file, learner, BELONGS)
    before = file.read_bytes()
    learner.step()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(MachineError, match="No space left on device"):
        checkpoints.save(file, learner, BELONGS)
    assert [one.name for one in tmp_path.iterdir()] == ["state.safetensors"]
    assert file.read_bytes() == before


def test_what_a_state_belongs_to_names_data_and_every_parameter_that_counts(settings: Any) -> None:
    def of(settings: Any, *pairs: TokenPair) -> dict[str, str]:
        return checkpoints.identity(settings, Tokenized(pairs, 0), "host 1")

    one, other = TokenPair((1,), (2,), (3,)), TokenPair((1,), (2,), (4,))
    assert of(settings, one) == of(settings, one)
    assert of(settings, one) != of(settings, other)
    assert of(settings, one) != of(settings.model_copy(update={"clip": 0.5}), one)
    assert of(settings, one) == of(settings.model_copy(update={"steps": 50, "sharing": "none"}), one)


def test_a_base_is_told_from_another_wherever_a_training_would_change_it(
    tiny_base: Path, tmp_path: Path
) -> None:
    same, other = tmp_path / "same", tmp_path / "other"
    for copy in (same, other):
        shutil.copytree(tiny_base, copy)
    content = bytearray((other / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (other / "model.safetensors").write_bytes(content)
    first, second, third = (identity.of_base(base.read(one)) for one in (tiny_base, same, other))
    assert first == second != third
