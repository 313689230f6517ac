"""A checkpoint is whole or not there, and belongs to one recipe and one model."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path

import pytest
import torch

from coresident.engines.pretrain import checkpoints
from coresident.engines.pretrain.checkpoints import Position
from coresident.errors import MachineError, UserError

IDENTITY = {"seed": "0", "shape.width": "16"}
MODEL = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3)}
MOMENTS = {"exp_avg.a": torch.zeros(2, 3), "step.a": torch.tensor(4.0)}


def save(out: Path, update: int, keep: bool = False) -> None:
    out.mkdir(exist_ok=True)
    checkpoints.save(out, Position(update=update, cursor={"passes": 0}), IDENTITY, MODEL, MOMENTS, keep)


def latest(out: Path) -> checkpoints.Checkpoint:
    found = checkpoints.latest(out)
    assert found is not None
    return found


def test_what_is_saved_is_found_again(tmp_path: Path) -> None:
    save(tmp_path / "run", 12)
    found = latest(tmp_path / "run")
    assert (found.position.update, found.position.cursor, found.identity) == (12, {"passes": 0}, IDENTITY)
    stored = checkpoints.tensors(found, checkpoints.MODEL, MODEL)
    assert all(torch.equal(stored[name], one) for name, one in MODEL.items())


def test_the_newest_stays_alone_or_all_stay(tmp_path: Path) -> None:
    for update in (9, 10, 100):
        save(tmp_path / "newest", update)
        save(tmp_path / "all", update, keep=True)
    assert [one.name for one in checkpoints.found(tmp_path / "newest")] == ["update-00000100"]
    assert [one.name for one in checkpoints.found(tmp_path / "all")] == [
        "update-00000009", "update-00000010", "update-00000100",
    ]  # fmt: skip
    assert latest(tmp_path / "all").position.update == 100


def test_a_disk_that_fills_leaves_the_previous_one(tmp_path: Path) -> None:
    """A real limit on file size stands in for a full disk: the kernel refuses the write in the middle of a file."""
    out = tmp_path / "run"
    save(out, 1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
            save(out, 2)
        except MachineError as error:
            code = 0 if "the one before is kept" in str(error) and str(out) in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert [one.name for one in (out / "checkpoints").iterdir()] == ["update-00000001"]
    assert checkpoints.tensors(latest(out), checkpoints.MODEL, MODEL)


def test_what_a_crash_left_half_written_is_no_checkpoint_and_is_cleared(tmp_path: Path) -> None:
    save(tmp_path, 1)
    half = tmp_path / "checkpoints" / ".writing-123"
    half.mkdir()
    (half / checkpoints.STATE).write_text("{}")
    assert latest(tmp_path).position.update == 1
    # Killed while it removed an older one: what is left of it would lie there for good, and be taken for one that is whole.
    removed = tmp_path / "checkpoints" / "update-00000002"
    removed.mkdir()
    (removed / checkpoints.MODEL).touch()
    checkpoints.clear_unfinished(tmp_path)
    assert not half.exists() and not removed.exists()
    assert latest(tmp_path).position.update == 1


def test_another_recipe_is_refused_by_the_name_of_what_differs(tmp_path: Path) -> None:
    save(tmp_path, 1)
    checkpoints.check_belongs(latest(tmp_path), IDENTITY)
    with pytest.raises(UserError, match="is of another recipe: seed was 0 and is now 1") as refused:
        checkpoints.check_belongs(latest(tmp_path), {**IDENTITY, "seed": "1"})
    assert "set it back" in refused.value.remedy


def test_another_models_tensors_are_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(UserError, match=r"of another model: a is \(2, 3\) there and \(3, 3\) here"):
        checkpoints.tensors(latest(tmp_path), checkpoints.MODEL, {**MODEL, "a": torch.zeros(3, 3)})
    with pytest.raises(UserError, match="c is missing there"):
        checkpoints.tensors(latest(tmp_path), checkpoints.MODEL, {**MODEL, "c": torch.zeros(1)})


@pytest.mark.parametrize("name", [checkpoints.MODEL, checkpoints.OPTIMISER])
def test_a_damaged_file_is_named_with_what_to_remove(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    file = latest(tmp_path).place / name
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(UserError, match="is damaged") as refused:
        checkpoints.tensors(latest(tmp_path), name)
    assert (
        "no earlier one is kept" in refused.value.remedy and f"put {file.parent} back" in refused.value.remedy
    )
    save(tmp_path, 2, keep=True)
    file = latest(tmp_path).place / name
    file.write_bytes(b"torn")
    with pytest.raises(UserError, match="is damaged") as refused:
        checkpoints.tensors(latest(tmp_path), name)
    assert refused.value.remedy == f"remove {file.parent} to go on from update-00000001"


@pytest.mark.parametrize("name", [checkpoints.MODEL, checkpoints.OPTIMISER])
def test_one_flipped_bit_anywhere_in_a_file_of_tensors_is_refused(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    found = latest(tmp_path)
    file = found.place / name
    content = file.read_bytes()
    for at in range(len(content)):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        with pytest.raises(UserError) as refused:
            checkpoints.tensors(found, name)
        assert refused.value.problem == f"{file} is damaged: it has another checksum than state.json says"
    file.write_bytes(content + b"\0")
    with pytest.raises(UserError, match=rf"it has {len(content) + 1} bytes where state\.json says"):
        checkpoints.tensors(found, name)
    file.write_bytes(content)
    assert checkpoints.tensors(found, name)


def test_a_checkpoint_from_before_checksums_were_kept_is_read(tmp_path: Path) -> None:
    save(tmp_path, 1)
    file = latest(tmp_path).place / checkpoints.STATE
    told = json.loads(file.read_text())
    assert told.pop("files").keys() == {checkpoints.MODEL, checkpoints.OPTIMISER}
    file.write_text(json.dumps(told))
    stored = checkpoints.tensors(latest(tmp_path), checkpoints.MODEL, MODEL)
    assert all(torch.equal(stored[name], one) for name, one in MODEL.items())


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}', json.dumps({"version": 9})])
def test_a_state_that_cannot_be_read_is_said_so(tmp_path: Path, text: str) -> None:
    save(tmp_path, 1)
    (latest(tmp_path).place / checkpoints.STATE).write_text(text)
    with pytest.raises(UserError, match=r"state\.json"):
        checkpoints.latest(tmp_path)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("identity", 5),
        ("files", 5),
        ("files", {"model.safetensors": {"sha256": "0"}}),
        ("position", {"update": "1"}),
        ("position", {"update": 1, "blocks": -3, "cursor": {"passes": 0}}),
        ("position", {"update": 1, "blocks": 3, "cursor": None}),
        ("position", {"update": 1, "blocks": 3, "cursor": {"passes": 0}, "elapsed_seconds": None}),
    ],
)
def test_a_state_in_which_no_training_was_is_said_so(tmp_path: Path, part: str, value: object) -> None:
    save(tmp_path, 1)
    file = latest(tmp_path).place / checkpoints.STATE
    file.write_text(json.dumps(json.loads(file.read_text()) | {part: value}))
    with pytest.raises(UserError, match=r"state\.json cannot be used") as refused:
        checkpoints.latest(tmp_path)
    assert "begins anew" in refused.value.remedy


def test_a_first_checkpoint_that_cannot_be_written_does_not_speak_of_one_before(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(MachineError, match="begins anew: no earlier one is kept"):
        save(tmp_path, 1)


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    save(out, 1)
    seen = []

    def read() -> int:
        found = latest(out)
        seen.append(found.position.update)
        if len(seen) == 1:
            save(out, 2)
        checkpoints.tensors(found, checkpoints.MODEL)
        return found.position.update

    assert (checkpoints.settled(out, read), seen) == (2, [1, 2])
    (latest(out).place / checkpoints.MODEL).write_bytes(b"torn")
    with pytest.raises(UserError, match="is damaged"):
        checkpoints.settled(out, read)
    assert seen == [1, 2, 2]
