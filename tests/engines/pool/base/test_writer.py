"""A named base is written once, whole, the same each time, whoever else is writing it or was killed while
doing so.
"""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from coresident.engines.pool.base import base, shapes, writer
from coresident.text import tokenizer


def command(where: Path) -> list[str]:
    return [sys.executable, "-m", "coresident.engines.pool.base.writer", "tiny", "float32", "0", str(where)]


def content(where: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(where.iterdir())}


def test_the_same_arguments_write_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        writer.write("tiny", "float32", seed, tmp_path / name)
    one, two, other = (content(tmp_path / name) for name in ("one", "two", "other"))
    assert one == two
    assert [name for name in one if one[name] != other[name]] == ["model.safetensors"]


def test_transformers_loads_it_with_its_tokenizer(tmp_path: Path) -> None:
    writer.write("tiny", "bfloat16", 3, tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", local_files_only=True)
    assert model.dtype == torch.bfloat16
    embedding = next(weight for weight in shapes.weights(shapes.SHAPES["tiny"]) if "embed" in weight.name)
    assert torch.equal(model.get_input_embeddings().weight, writer.draw(embedding, "bfloat16", 3))
    ids = tokenizer.load(tmp_path / "base")("def main():")["input_ids"]
    assert max(ids) < shapes.SHAPES["tiny"]["vocab_size"]


def test_shards_hold_the_same_tensors_as_one_file(tmp_path: Path) -> None:
    writer.write("tiny", "float32", 0, tmp_path / "single")
    writer.write("tiny", "float32", 0, tmp_path / "sharded", shard=100_000)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    single = AutoModelForCausalLM.from_pretrained(tmp_path / "single", local_files_only=True).state_dict()
    sharded = AutoModelForCausalLM.from_pretrained(tmp_path / "sharded", local_files_only=True).state_dict()
    assert all(torch.equal(single[name], sharded[name]) for name in single)
    assert base.read(tmp_path / "sharded").bytes("float32") == base.read(tmp_path / "single").bytes("float32")


def test_two_writers_at_once_leave_one_whole_base(tmp_path: Path) -> None:
    where = tmp_path / "base"
    writers = [subprocess.Popen(command(where)) for _ in range(2)]
    assert [process.wait() for process in writers] == [0, 0]
    writer.write("tiny", "float32", 0, tmp_path / "alone")
    assert content(where) == content(tmp_path / "alone")
    assert not list(tmp_path.glob(".*aside*"))


def test_what_a_killed_writer_left_is_never_taken_for_a_base(tmp_path: Path) -> None:
    where = tmp_path / "base"
    process = subprocess.Popen(command(where))
    while not list(tmp_path.glob(".base.aside-*")):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not where.exists()
    writer.write("tiny", "float32", 0, where)
    assert base.read(where).dtype == "float32"
    assert not list(tmp_path.glob(".*aside*"))
