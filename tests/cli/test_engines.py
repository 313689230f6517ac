"""What the engines' commands share: a voice that nobody hears is silent, a result that cannot be written is an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from coresident.cli.engines import merged, voices


def test_a_voice_on_a_full_disk_or_a_closed_pipe_falls_silent() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with Path("/dev/full").open("w") as full, os.fdopen(writer, "w") as closed:
        for stream in (full, closed):
            say, now = voices(stream, quiet=False)
            for _ in range(2):
                say("anybody there?")
                now("anybody?")


def test_a_voice_speaks_in_lines_unless_it_is_quiet(tmp_path: Path) -> None:
    for quiet, heard in ((False, "one\ntwo\n"), (True, "")):
        with (tmp_path / "said").open("w") as stream:
            say, now = voices(stream, quiet)
            say("one")
            now("only on a terminal")
            say("two")
        assert (tmp_path / "said").read_text() == heard


def test_a_result_that_cannot_be_written_is_an_error_of_the_machine() -> None:
    program = "from coresident.cli.engines import show; from coresident.cli.app import statuses\n"
    program += "with statuses(False): show({'loss': 1.5}, True)"
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 2
    assert ended.stderr.startswith("coresident: standard output cannot be written: No space left on device")


def test_settings_are_laid_over_one_another_mapping_by_mapping() -> None:
    below = {"runtime": {"threads": 1, "compile": False}, "seed": 1}
    assert merged(below, {"runtime": {"threads": 2}, "seed": 2}) == {
        "runtime": {"threads": 2, "compile": False},
        "seed": 2,
    }
