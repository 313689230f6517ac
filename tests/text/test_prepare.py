"""`prepare`: the same bytes for any number of workers, every token of every document, and all or nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
from filelock import FileLock

from coresident.errors import MachineError, UserError
from coresident.text import tokenizer
from coresident.text.blocks import IGNORED
from coresident.text.cache import TokenCache
from coresident.text.corpus import CorpusSource, documents
from coresident.text.order import Order
from coresident.text.prepare import Prepare, prepare

PYTHON = CorpusSource(limit=150_000, validation_share=0.1)


def _files(tmp_path: Path, texts: list[str], name: str = "texts.jsonl", share: float = 0.0) -> CorpusSource:
    path = tmp_path / name
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return CorpusSource(kind="files", files={"web": (str(path),)}, validation_share=share)


def _contents(cache: TokenCache) -> dict[str, bytes]:
    return {
        str(path.relative_to(cache.path)): path.read_bytes()
        for path in sorted(cache.path.rglob("*"))
        if path.is_file()
    }


def test_the_bytes_do_not_depend_on_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Small pieces, so that there are more of them than workers.
    monkeypatch.setattr("coresident.text.workers.PIECE", 20_000)
    settings = Prepare(source=PYTHON, vocabulary=400, shard_tokens=30_000)
    made = [prepare(settings, tmp_path / f"c{workers}", workers) for workers in (1, 2, 3)]
    assert _contents(made[0]) == _contents(made[1]) == _contents(made[2])
    assert len({cache.identity for cache in made}) == 1
    assert len(list(made[0].path.glob("train-code-*.bin"))) > 1
    made[1].verify()


def test_every_document_is_whole_in_its_family_and_split(tmp_path: Path) -> None:
    cache = prepare(Prepare(source=PYTHON, vocabulary=400), tmp_path / "cache")
    own = tokenizer.load(cache.tokenizer_dir)
    for family in ("code", "prose"):
        for split in ("train", "validation"):
            tokens = cache.tokens(split, family).read(0, 1 << 30)
            ends = np.flatnonzero(tokens == cache.end) + 1
            found = [own.decode(part[:-1]) for part in np.split(tokens, ends)[:-1]]
            asked = [
                one.text for one in documents(PYTHON, family) if one.validation == (split == "validation")
            ]
            assert len(tokens) == ends[-1]
            assert found == asked
    assert cache.families == ("code", "prose")
    assert int(max(cache.tokens("train").read(0, 1 << 30))) < cache.vocabulary == 400


def test_documents_without_an_end_empty_ones_and_one_of_10_mb_lose_no_token(
    small_tokenizer: Path, tmp_path: Path
) -> None:
    # Words end with their line here, so that the tokens of one line are those of all.
    line = "the cat sat on the mat, and the dog sat on the cat.\n"
    long = line * 200_000
    texts = ["no newline at the end", "", "", f"half an end: {tokenizer.END[:-2]}", long, "last\n"]
    source = _files(tmp_path, texts)
    cache = prepare(
        Prepare(source=source, tokenizer=str(small_tokenizer), shard_tokens=1 << 20), tmp_path / "cache"
    )
    assert len(long) > 10_000_000

    own = tokenizer.load(small_tokenizer).backend_tokenizer
    ids = [own.encode(line).ids * 200_000 if text is long else own.encode(text).ids for text in texts]
    expected = np.concatenate([[*some, cache.end] for some in ids])
    assert np.array_equal(cache.tokens("train").read(0, 1 << 30), expected)

    order = Order(cache, "train", 1000, seed=3, range_bytes=1 << 20)
    seen = np.zeros(len(expected), bool)
    for batch in order.batches(None, 64):
        places = batch.ids[:, None] * 1000 + 1 + np.arange(1000)
        valid = batch.targets() != IGNORED
        assert np.array_equal(batch.targets()[valid], expected[places[valid]])
        assert not seen[places[valid]].any()
        seen[places[valid]] = True
        if batch.cursor.passes:
            break
    assert seen[1:].all()
    assert order.targets == len(expected) - 1


def test_the_tokenizer_has_not_seen_what_is_held_out(tmp_path: Path) -> None:
    train, held = (tmp_path / name for name in ("train.txt", "held.txt"))
    train.write_text("abc " * 1000)
    held.write_text("xyzzy " * 1000)
    source = CorpusSource(kind="files", files={"web": (str(train),)}, validation={"web": (str(held),)})
    cache = prepare(Prepare(source=source, vocabulary=270), tmp_path / "cache")
    known = tokenizer.load(cache.tokenizer_dir).get_vocab()
    assert "abc" in known
    assert not [word for word in known if "zz" in word]


def test_a_tokenizer_takes_so_many_bytes_of_each_family(tmp_path: Path) -> None:
    first, second = (tmp_path / name for name in ("1.txt", "2.txt"))
    first.write_text("abc " * 1000 + "---" + "hidden " * 1000)
    second.write_text("uvw " * 1000)
    source = CorpusSource(
        kind="files", files={"one": (str(first),), "two": (str(second),)}, separator="---", validation_share=0
    )
    cache = prepare(Prepare(source=source, vocabulary=280, tokenizer_bytes=4000), tmp_path / "cache")
    known = tokenizer.load(cache.tokenizer_dir).get_vocab()
    assert {"abc", "uvw"} <= set(known)
    assert "hidden" not in known


def test_a_split_that_should_have_text_and_has_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none of 1 documents fell to validation; give source\.validation"):
        prepare(Prepare(source=_files(tmp_path, ["all in one"], share=0.01)), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_text_leaves_nothing_behind(tmp_path: Path, small_tokenizer: Path, workers: int) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "good"}\n' * 20_000 + "bad\n")
    source = CorpusSource(kind="files", files={"web": (str(path),)}, validation_share=0)
    with pytest.raises(UserError, match=r"x\.jsonl line 20001: not JSON"):
        prepare(Prepare(source=source, tokenizer=str(small_tokenizer)), tmp_path / "cache", workers)
    assert sorted(one.name for one in tmp_path.iterdir() if not one.name.startswith(".")) == ["x.jsonl"]


def test_a_cache_that_is_there_is_not_overwritten(tmp_path: Path, small_tokenizer: Path) -> None:
    settings = Prepare(source=_files(tmp_path, ["some text"]), tokenizer=str(small_tokenizer))
    (tmp_path / "cache").mkdir()
    cache = prepare(settings, tmp_path / "cache")
    with pytest.raises(UserError, match="is already there; give another --out, or remove it"):
        prepare(settings, tmp_path / "cache")
    assert TokenCache.open(cache.path).identity == cache.identity


def test_two_at_once_do_not_mix(tmp_path: Path) -> None:
    with (
        FileLock(tmp_path / ".cache.lock"),
        pytest.raises(MachineError, match=r"another prepare is writing .*cache; wait for it"),
    ):
        prepare(Prepare(source=PYTHON), tmp_path / "cache")


def test_progress_says_how_much_text_is_done(tmp_path: Path, small_tokenizer: Path) -> None:
    said: list[tuple[float, float, str]] = []
    source = _files(tmp_path, ["ä" * 50] * 3)
    prepare(
        Prepare(source=source, tokenizer=str(small_tokenizer)),
        tmp_path / "cache",
        progress=lambda *what: said.append(what),
    )
    assert said == [(300, 0, "bytes of text")]


def test_files_that_are_left_out_are_said_in_one_line_of_the_commonest_suffixes(
    tmp_path: Path, small_tokenizer: Path
) -> None:
    text, held = tmp_path / "text", tmp_path / "held"
    for directory in (text, held):
        directory.mkdir()
        (directory / "good.txt").write_text("some text")
        (directory / "Makefile").touch()
    for number in range(9):
        (text / f"x.{number}").touch()
    source = CorpusSource(kind="files", files={"web": (str(text),)}, validation={"web": (str(held),)})
    said: list[str] = []
    prepare(Prepare(source=source, tokenizer=str(small_tokenizer)), tmp_path / "cache", say=said.append)
    few = ", ".join(f".{number} 1" for number in range(7))
    assert said == [f"left out: 11 files of kinds that are not read (no suffix 2, {few}, others 2)"]


# Interruptions, with real processes

SCRIPT = """
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from coresident.text.corpus import CorpusSource
from coresident.text.prepare import Prepare, prepare

def tell(done, total, unit):
    print(done, flush=True)

if __name__ == "__main__":
    settings = Prepare(
        source=CorpusSource(limit=int(sys.argv[2])), vocabulary=300, tokenizer_bytes=10_000, shard_tokens=20_000
    )
    prepare(settings, Path(sys.argv[1]), 2, tell)
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    """A prepare of megabytes with two workers, once its first tokens are written."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "cache"), "30000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    children = psutil.Process(process.pid).children(recursive=True)
    yield Started(process, [child for child in children if "spawn_main" in " ".join(child.cmdline())])
    for left in (process, *children):
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    process.communicate()


@dataclass(frozen=True)
class Started:
    """A running prepare and its workers."""

    process: subprocess.Popen[str]
    workers: list[psutil.Process]

    def all_gone(self) -> bool:
        """Whether no worker outlives it, given a few seconds."""
        _, alive = psutil.wait_procs(self.workers, timeout=10)
        return not alive


def test_a_killed_prepare_leaves_no_cache_and_no_worker_and_the_next_one_begins_anew(
    started: Started, tmp_path: Path, small_tokenizer: Path
) -> None:
    assert len(started.workers) == 2
    started.process.kill()
    started.process.wait()
    assert started.all_gone()
    assert not (tmp_path / "cache").exists()
    assert list((tmp_path / "cache.partial").glob("*.bin"))
    with pytest.raises(UserError, match="is unfinished"):
        TokenCache.open(tmp_path / "cache")

    again = Prepare(source=_files(tmp_path, ["some text"]), tokenizer=str(small_tokenizer))
    cache = prepare(again, tmp_path / "cache")
    assert sorted(_contents(cache)) == [
        "manifest.json",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
        "train-web-00000.bin",
    ]
    assert not (tmp_path / "cache.partial").exists()


def test_ctrl_c_cleans_up_and_is_said_once(started: Started, tmp_path: Path) -> None:
    # A terminal sends it to the workers too.
    os.killpg(started.process.pid, signal.SIGINT)
    _, said = started.process.communicate(timeout=30)
    assert said.splitlines()[-1] == "KeyboardInterrupt"
    assert "SpawnProcess" not in said
    assert started.all_gone()
    assert not list(tmp_path.glob("cache*"))


def test_a_killed_worker_is_an_error_and_not_a_hang(started: Started, tmp_path: Path) -> None:
    started.workers[0].kill()
    _, said = started.process.communicate(timeout=30)
    assert "a worker that tokenizes was killed (memory?); prepare with fewer --workers" in said
    assert not list(tmp_path.glob("cache*"))


def test_a_disk_that_refuses_more_is_an_error_and_leaves_nothing(
    tmp_path: Path, small_tokenizer: Path
) -> None:
    script = tmp_path / "script.py"
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))\n"
    script.write_text(limit + SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "cache"), "100000"],
        capture_output=True,
        text=True,
    )
    assert "MachineError" in done.stderr
    assert "cache cannot be written: File too large" in done.stderr
    assert not list(tmp_path.glob("cache*"))
