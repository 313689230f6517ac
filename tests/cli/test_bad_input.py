"""Bad input, command by command: one sentence that names the file, key or line, the remedy, status 2, nothing touched.

Each row is refused as it stands, in this process; `test_real_processes` shows that the same comes out of a real one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

STUDY = """\
study: scale                                   # line 1
question: Does sharing fit more learners?
workload: pool.dpo
parameters:
  base: {config: tiny}                         # line 5
  data: {source: arithmetic, pairs: 4}
  steps: 2
  max_length: 32
arms:
  copy: {sharing: none}                        # line 10
  fork: {sharing: fork}
factors:
  learners: [1, 2]                             # line 13
repetitions: {min: 3}
controls: [finite]                             # line 15
hypotheses:
  H1:
    claim: forked learners need less memory
    metric: peak_memory_mib                    # line 19
    compare: {arm: fork, to: copy}
    expect: {ratio: {at_most: 0.9}}
"""
PAIR = {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}

Given = Callable[[Path], object]


@dataclass(frozen=True)
class Bad:
    """What is given, what is called, and what must be said: all of `says` in the sentence, `remedy` below it."""

    call: tuple[str, ...]
    says: tuple[str, ...]
    remedy: str
    given: tuple[Given, ...] = ()


def bad(call: str | tuple[str, ...], says: str | tuple[str, ...], remedy: str, *given: Given) -> Bad:
    """A row; texts are split at spaces into arguments, and stand for one thing said."""
    words = tuple(call.split()) if isinstance(call, str) else call
    return Bad(words, (says,) if isinstance(says, str) else says, remedy, given)


def study(*replaced: tuple[str, str], text: str = STUDY) -> Given:
    """`s.yaml`: the study above with texts replaced."""

    def write(place: Path) -> None:
        changed = text
        for old, new in replaced:
            assert old in changed
            changed = changed.replace(old, new)
        (place / "s.yaml").write_text(changed)

    return write


def file(name: str, content: str = "") -> Given:
    """A file in the working directory."""

    def write(place: Path) -> None:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(content)

    return write


def pairs(*lines: Any) -> tuple[Given, Given]:
    """A study over `pairs.jsonl`, which holds these lines."""
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    asked = ("{source: arithmetic, pairs: 4}", "{source: files, files: [pairs.jsonl]}")
    return study(asked), file("pairs.jsonl", text)


def base(weights: bool) -> tuple[Given, Given]:
    """A study over the directory `base`: a model's configuration, with or without weights, and no tokenizer."""

    def write(place: Path) -> None:
        (place / "base").mkdir()
        (place / "base" / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
        if weights:
            import numpy
            from safetensors.numpy import save_file

            save_file(
                {"lm_head.weight": numpy.zeros((4, 4), numpy.float32)}, place / "base/model.safetensors"
            )

    return study(("{config: tiny}", "{path: base}")), write


def mounted(options: str) -> Given:
    """A file system of its own at `disk`; needs root."""

    def mount(place: Path) -> None:
        (place / "disk").mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(place / "disk")]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("only root may mount the small disk that this row fills")

    return mount


def fill(place: Path) -> None:
    """Fill the disk at `disk` to its last byte."""
    with (place / "disk" / "filler").open("wb", buffering=0) as filler:
        try:
            while filler.write(bytes(4096)):
                pass
        except OSError:
            pass


def onto_disk(place: Path) -> None:
    """Put the finished run on the disk at `disk`, which is then full."""
    subprocess.run(["cp", "-r", str(place / "runs/small"), str(place / "disk/small")], check=True)
    fill(place)


def unwritable(place: Path) -> None:
    """A directory that cannot be written: by its mode, or, for root, by a mount."""
    if os.geteuid() == 0:
        mounted("size=64k,ro")(place)
    else:
        (place / "disk").mkdir(mode=0o555)


def record(change: Callable[[dict[str, Any]], object]) -> Given:
    """The finished run with its first record changed."""

    def write(place: Path) -> None:
        path = min((place / "runs/small/records").iterdir())
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))

    return write


def torn(place: Path) -> None:
    """The finished run with its first record cut in half."""
    path = min((place / "runs/small/records").iterdir())
    path.write_text(path.read_text()[:200])


def read_only(command: str, *more: str) -> dict[str, Bad]:
    """What each command that reads a run directory refuses."""

    def call(run: str = "runs/small") -> tuple[str, ...]:
        return (command, run, *more)

    wrong = record(lambda value: value.update(schema_version=3))
    strange = record(lambda value: value.update(colour="red"))
    nan = record(lambda value: value.update(duration=float("nan")))
    return {
        "no path": bad(command, "Missing argument 'run'", f"Try 'coresident {command} --help'"),
        "unknown option": bad(
            (*call(), "--jsno"), "No such option: --jsno", f"Try 'coresident {command} --help'"
        ),
        "no such run": bad(call("runs/smal"), "runs/smal is no", "such as runs/demo"),
        "another directory": bad(
            call("runs"), "runs is no", "such as runs/demo", file("runs/notes.txt", "x")
        ),
        "a file": bad(call("small.yaml"), "small.yaml is no", "such as runs/demo"),
        "unknown schema": bad(
            call(),
            ("runs/small/records/one-", "schema_version 3"),
            "the version of coresident that wrote it",
            wrong,
        ),
        "unknown key in a record": bad(
            call(), ("runs/small/records/one-", "colour"), "restore the file", strange
        ),
        "not strict JSON": bad(call(), ("runs/small/records/one-", "NaN"), "restore the file", nan),
        "torn record": bad(call(), ("runs/small/records/one-", "not strict JSON"), "restore the file", torn),
        "a stranger among records": bad(
            call(),
            "runs/small/records/notes.json",
            "move it out",
            file("runs/small/records/notes.json", "{}"),
        ),
    }


HELP = "Try 'coresident run --help'"
RUN = {
    "no study": bad("run", "Missing argument 'study'", HELP),
    "unknown option": bad("run s.yaml --dryrun", "No such option: --dryrun", "--dry-run", study()),
    "too many arguments": bad("run s.yaml t.yaml", "extra argument", HELP, study()),
    "no such file": bad("run t.yaml", "t.yaml does not exist", "check the path", study()),
    "unknown shipped study": bad("run demmo", "unknown study 'demmo'", "did you mean 'demo'?"),
    "a name too long": bad(
        f"run {300 * 's'}.yaml", "... is too long for the name of a file", "give a shorter one"
    ),
    "a directory": bad("run d", "d is a directory", "give a YAML file", file("d/s.yaml")),
    "not UTF-8": bad(
        "run s.yaml",
        "s.yaml: not UTF-8",
        "save the file as UTF-8",
        lambda place: (place / "s.yaml").write_bytes(b"\xff"),
    ),
    "not YAML": bad(
        "run s.yaml", "s.yaml: line 6: not YAML", "correct the syntax", study(("arithmetic,", "[,"))
    ),
    "an empty file": bad(
        "run s.yaml", "s.yaml: a study is a mapping", "coresident init NAME", file("s.yaml")
    ),
    "unknown key": bad(
        "run s.yaml",
        ("s.yaml: repetitons (line 14)", "unknown key"),
        "did you mean 'repetitions'?",
        study(("repetitions", "repetitons")),
    ),
    "unknown key of a parameter": bad(
        "run s.yaml",
        ("parameters.stepps (line 7)", "unknown key 'stepps'"),
        "did you mean 'steps'?",
        study(("steps", "stepps")),
    ),
    "unknown key of an arm": bad(
        "run s.yaml",
        ("arms.copy.shering (line 10)", "unknown key"),
        "did you mean 'sharing'?",
        study(("sharing: none", "shering: none")),
    ),
    "unknown factor": bad(
        "run s.yaml",
        ("factors.learner (line 13)", "unknown key"),
        "did you mean 'learners'?",
        study(("learners: [", "learner: [")),
    ),
    "wrong type": bad(
        "run s.yaml",
        ("parameters.steps (line 7)", "a whole number"),
        "correct the value",
        study(("steps: 2", "steps: two")),
    ),
    "wrong type of the study": bad(
        "run s.yaml", ("controls (line 15)", "a list"), "correct the value", study(("[finite]", "finite"))
    ),
    "not finite": bad(
        "run s.yaml",
        ("s.yaml: parameters.beta (line 7)", ".inf"),
        "finite",
        study(("steps: 2", "beta: .inf")),
    ),
    "duplicate key": bad(
        "run s.yaml",
        ("s.yaml: parameters.steps (line 8)", "duplicate key 'steps', first on line 7"),
        "remove one",
        study(("max_length: 32", "steps: 3")),
    ),
    "empty factor": bad(
        "run s.yaml", ("factors.learners (line 13)", "empty"), "at least one", study(("[1, 2]", "[]"))
    ),
    "a level twice": bad(
        "run s.yaml", "level 1 is listed twice", "list each level once", study(("[1, 2]", "[1, 1]"))
    ),
    "no arms": bad("run s.yaml --set arms={}", ("--set arms={}: arms", "empty"), "at least one", study()),
    "min above max": bad(
        "run s.yaml",
        ("repetitions (line 14)", "min (9) is above max (3)"),
        "correct",
        study(("{min: 3}", "{min: 9, max: 3}")),
    ),
    "unknown workload": bad(
        "run s.yaml",
        ("s.yaml: workload (line 3)", "'pool.dop'"),
        "did you mean 'pool.dpo'?",
        study(("pool.dpo", "pool.dop")),
    ),
    "unknown arm": bad(
        "run s.yaml",
        ("hypotheses.H1.compare.to (line 20)", "no arm 'copi'"),
        "did you mean 'copy'?",
        study(("to: copy", "to: copi")),
    ),
    "unknown metric": bad(
        "run s.yaml",
        ("hypotheses.H1.metric (line 19)", "'peak_memory'"),
        "did you mean 'peak_memory_mib'?",
        study(("peak_memory_mib", "peak_memory")),
    ),
    "misspelt metric of any command": bad(
        "run s.yaml",
        ("hypotheses.H.metric (line 5)", "'wall_secs'"),
        "did you mean 'wall_seconds'?",
        study(
            text="study: s\nquestion: q\nworkload: command\nhypotheses: {H: {claim: c, compare: {arm: a, to: b},\n"
            " metric: wall_secs, expect: {ratio: {at_most: 1}}}}\narms: {a: {shell: 'true'}, b: {shell: 'true'}}\n"
        ),
    ),
    "unknown control": bad(
        "run s.yaml",
        ("controls[0] (line 15)", "'finit'"),
        "did you mean 'finite'?",
        study(("[finite]", "[finit]")),
    ),
    "unknown level": bad(
        "run s.yaml",
        ("hypotheses.H1.compare.at.learners (line 20)", "no level 3"),
        "known: 1, 2",
        study(("to: copy", "to: copy, at: {learners: 3}")),
    ),
    "unknown device": bad(
        "run s.yaml --devices cpuu", "unknown device 'cpuu'", "did you mean 'cpu'?", study()
    ),
    # What there is instead depends on the machine.
    "no such card": bad("run s.yaml --devices 99", "'99'", "", study()),
    "devices mixed": bad("run s.yaml --devices cpu,0", "'cpu,0' mixes", "one kind of device", study()),
    "no base": bad(
        "run s.yaml",
        ("s.yaml: cell copy-", "base is not a directory"),
        "already downloaded",
        study(("{config: tiny}", "{path: base}")),
    ),
    "base without weights": bad(
        "run s.yaml", ("s.yaml: cell copy-", "base has no weights"), "safetensors", *base(weights=False)
    ),
    "base without tokenizer": bad(
        "run s.yaml",
        ("s.yaml: cell copy-", "base has no tokenizer"),
        "beside the weights",
        *base(weights=True),
    ),
    "no such data": bad("run s.yaml", "pairs.jsonl cannot be read", "a readable JSONL file", pairs()[0]),
    "a broken line": bad(
        "run s.yaml",
        "pairs.jsonl line 2: not JSON at column",
        "one JSON object a line",
        *pairs(PAIR, '{"prompt": "2'),
    ),
    "a missing field": bad(
        "run s.yaml",
        ("pairs.jsonl line 2", "'rejected' is missing"),
        "prompt, chosen and rejected",
        *pairs(PAIR, {"prompt": "a", "chosen": "b"}),
    ),
    "an empty completion": bad(
        "run s.yaml",
        ("pairs.jsonl line 2", "'chosen' is empty"),
        "remove the line",
        *pairs(PAIR, {**PAIR, "chosen": " "}),
    ),
    "a completion that truncation removes": bad(
        "run s.yaml",
        ("pairs.jsonl line 2", "max_length 32 removes the whole completion"),
        "raise max_length above",
        *pairs(PAIR, {**PAIR, "prompt": "How much is it? " * 20}),
    ),
    "no learners": bad(
        "run s.yaml", ("factors.learners (line 13)", "0"), "correct the value", study(("[1, 2]", "[1, 0]"))
    ),
    "not enough memory": bad(
        "run s.yaml",
        ("s.yaml: cell copy-learners-", "of memory"),
        "ask for less",
        study(("tiny", "qwen2.5-7b"), ("[1, 2]", "[1, 1024]"), ("arithmetic, pairs: 4", "python-docs")),
    ),
    "not enough cores": bad(
        "run s.yaml",
        ("s.yaml: cell copy-", "asks for 4000 cores"),
        "fewer workers",
        study(("steps: 2", "cpus: 4000")),
    ),
    "no such program": bad(
        "run s.yaml",
        ("s.yaml: cell a-", "'trueish' is in no directory of PATH"),
        "install it",
        study(text="study: s\nquestion: q\nworkload: command\narms: {a: {argv: [trueish]}}\n"),
    ),
    "--set without =": bad(
        "run s.yaml --set steps", "--set steps: not of the form", "--set steps=VALUE", study()
    ),
    "--set of an unknown key": bad(
        "run s.yaml --set repetitions.mix=4",
        ("--set repetitions.mix=4", "'mix'"),
        "did you mean 'min'?",
        study(),
    ),
    "--set of an unknown parameter": bad(
        "run s.yaml --set parameters.data.pair=3",
        ("--set parameters.data.pair=3", "'pair'"),
        "did you mean 'pairs'?",
        study(),
    ),
    "--set of a wrong type": bad(
        "run s.yaml --set parameters.steps=x",
        ("--set parameters.steps=x", "a whole number"),
        "correct",
        study(),
    ),
    "--set below a list": bad(
        "run s.yaml --set controls.finite=1",
        ("--set controls.finite=1", "a list"),
        "--set controls=",
        study(),
    ),
    "no budget": bad("run s.yaml --budget-minutes 0", "--budget-minutes 0", "above 0", study()),
    "a budget that is no number": bad(
        "run s.yaml --budget-minutes nan", "--budget-minutes nan", "above 0", study()
    ),
    "output is a file": bad("run s.yaml --out s.yaml", "s.yaml is not a directory", "another --out", study()),
    "output below a file": bad("run s.yaml --out s.yaml/x", "s.yaml is no directory", "by --out", study()),
    "output unwritable": bad("run s.yaml --out disk/x", "cannot write", "--out", study(), unwritable),
    "full disk": bad(
        "run s.yaml --out disk/x", "on the disk of disk/x", "free disk space", study(), mounted("size=64k")
    ),
    "a directory of something else": bad(
        "run s.yaml --out d", "d holds 'notes.txt'", "another --out", study(), file("d/notes.txt", "mine")
    ),
    "a run of another study": bad(
        "run s.yaml --out runs/small", "holds study 'small', not 'scale'", "another --out", study()
    ),
    "a run of a changed study": bad(
        "run small.yaml --set arms.one.env.SPEED=3",
        ("arms.one.env.SPEED changed from 1 to 3", "'small'"),
        "another --out",
    ),
    "a plan of an unknown schema": bad(
        "run small.yaml",
        ("runs/small/plan.json", "schema_version"),
        "another --out",
        file("runs/small/plan.json", '{"schema_version": 2}'),
    ),
    "records of an unknown schema": bad(
        "run small.yaml",
        ("runs/small/records/one-", "schema_version 3"),
        "the version of coresident that wrote it",
        record(lambda value: value.update(schema_version=3)),
    ),
}

QUOTE = "quote each as one word"
TRY = {
    "no command": bad("try", "Missing argument 'commands'", "Try 'coresident try --help'"),
    "one command": bad("try -- true", "try compares two commands, 1 given", QUOTE),
    "three commands": bad("try -- sleep 1 true", "try compares two commands, 3 given", QUOTE),
    "an empty command": bad(("try", "--", "true", " "), "command B is empty", "what a shell would run"),
    "unknown option": bad("try --metrics wall_seconds -- true true", "No such option: --metrics", "--metric"),
    "a misspelt metric": bad(
        "try --metric cpu_second -- true true", ("metric", "'cpu_second'"), "did you mean 'cpu_seconds'?"
    ),
    "an empty metric": bad(
        ("try", "--metric", "", "--", "true", "true"), "--metric is empty", "wall_seconds"
    ),
    "no repetitions": bad("try --repetitions 0 -- true true", "--repetitions 0", "give for example 5"),
    "repetitions that are no number": bad(
        "try --repetitions x -- true true", "Invalid value for '--repetitions'", "Try 'coresident try --help'"
    ),
    "a width that is none": bad("try --half-width nan -- true true", "--half-width nan", "0.02"),
    "a directory of something else": bad(
        "try --out d -- true true", "d holds 'notes.txt'", "another --out", file("d/notes.txt", "mine")
    ),
    "a run of something else": bad(
        "try --out runs/small -- true true", "holds study 'small'", "another --out"
    ),
    "full disk": bad(
        "try --out disk/x -- true true", "on the disk of disk/x", "free disk space", mounted("size=64k")
    ),
    "runs is a file": bad(
        "try -- true true",
        "cannot write to runs",
        "--out",
        lambda place: subprocess.run(["rm", "-r", "runs"], cwd=place, check=True),
        file("runs"),
    ),
}

INIT = {
    "no name": bad("init", "Missing argument 'name'", "Try 'coresident init --help'"),
    "a name with a slash": bad("init a/b", "'a/b' is not usable", "use letters"),
    "an empty name": bad(("init", ""), "'' is not usable", "use letters"),
    "a name that exists": bad("init small", "small.yaml exists already", "choose another name"),
    "full disk": bad(
        ("init", "mine"), "cannot write mine.yaml: no space left", "free space", mounted("size=64k"), fill
    ),
    "unwritable": bad(("init", "mine"), "cannot write mine.yaml", "writable", unwritable),
}

STUDIES = {
    "unknown option": bad("studies --jsn", "No such option: --jsn", "Try 'coresident studies --help'"),
    "an argument": bad("studies demo", "extra argument", "Try 'coresident studies --help'"),
}

SHOW = {
    **read_only("show"),
    "no such cell": bad("show runs/small tow", "no cell 'tow'", "known: one-"),
    "several cells": bad(("show", "runs/small", ""), "'' fits several cells", "name one of one-"),
    "unknown view": bad("show runs/small --view loses", "no view 'loses'", "did you mean 'losses'?"),
    "a view of something else": bad(
        "show runs/small --view losses", ("records of pool.dpo", "are of command"), "leave --view out"
    ),
}

IMPORT = {
    "nothing": bad("import", "Missing argument 'what'", "Try 'coresident import --help'"),
    "nowhere to": bad("import smolvm d", "Missing option '--out'", "Try 'coresident import --help'"),
    "unknown importer": bad("import smolvmm d --out o", "imports 'smolvmm'", "did you mean 'smolvm'?"),
    "no directory": bad("import smolvm d --out o", "d is not a directory", "result files"),
    "no result files": bad(
        "import smolvm d --out o",
        "d holds no result file (*.json)",
        "bench/results",
        file("d/notes.txt", "x"),
    ),
    "no result of its kind": bad(
        "import smolvm d --out o",
        ("d/a.json is no result", "arm: field required"),
        "move it away",
        file("d/a.json", "{}"),
    ),
    "not JSON": bad(
        "import smolvm d --out o", "d/a.json cannot be read as JSON", "move it away", file("d/a.json", "{")
    ),
    "a run that is there": bad(
        "import smolvm d --out runs/small",
        "runs/small is there already",
        "name a new directory",
        file("d/a.json", "{}"),
    ),
}

LOGS = {
    **read_only("logs", "one"),
    "no cell": bad("logs runs/small", "Missing argument 'cell'", "Try 'coresident logs --help'"),
    "no such cell": bad("logs runs/small tow", "no cell 'tow'", "known: one-"),
    "no such attempt": bad(
        "logs runs/small one --attempt two",
        ("no record 'two'", "cell 'one'"),
        "coresident records runs/small lists",
    ),
    "the start of an attempt": bad(
        "logs runs/small one --attempt one-", ("no record 'one-'", "cell 'one'"), "did you mean 'one-"
    ),
    "no logs": bad(
        "logs runs/small one",
        ("runs/small/cells/one-", "no logs"),
        "where it was measured",
        lambda place: subprocess.run(["rm", "-r", "runs/small/cells"], cwd=place, check=True),
    ),
}

RECORDS = {
    **read_only("records"),
    **{f"{name}, as CSV": row for name, row in read_only("records", "--csv").items() if name != "no path"},
    "two formats": bad("records runs/small --csv --json", "--csv and --json", "give one of them"),
}

WHY = ("--why", "the fan was off")
RETRACT = {
    **read_only("retract", "one", *WHY),
    "no record": bad(
        ("retract", "runs/small"), "Missing argument 'record'", "Try 'coresident retract --help'"
    ),
    "no such record": bad(
        ("retract", "runs/small", "one", *WHY), "runs/small has no record 'one'", "did you mean 'one-"
    ),
    "a record that is like none": bad(
        ("retract", "runs/small", "xx", *WHY),
        "runs/small has no record 'xx'",
        "coresident records runs/small lists them",
    ),
    "no reason": bad(
        "retract runs/small RECORD", "Missing option '--why'", "Try 'coresident retract --help'"
    ),
    "an empty reason": bad(
        ("retract", "runs/small", "RECORD", "--why", " "), ("RECORD", "gives no reason"), "say why"
    ),
    "twice": bad(
        ("retract", "runs/small", "RECORD", *WHY),
        ("RECORD is already retracted: the fan was off",),
        "nothing was changed",
        lambda place: subprocess.run(
            [sys.executable, "-m", "coresident", "retract", "runs/small", first(place), *WHY],
            cwd=place,
            check=True,
        ),
    ),
    "full disk": bad(
        ("retract", "disk/small", "RECORD", *WHY),
        "no space left on device",
        "free space",
        mounted("size=256k"),
        onto_disk,
    ),
}

STATUS = read_only("status")

VERDICT = {
    "a name too long": bad(
        f"verdict {300 * 'r'}", "... is too long for the name of a file", "give a shorter one"
    ),
    **read_only("verdict"),
    "two formats": bad("verdict runs/small --json --markdown", "--json and --markdown", "give one of them"),
    "no study": bad(
        "verdict runs/small",
        "runs/small/study.yaml",
        "check the path",
        lambda place: (place / "runs/small/study.yaml").unlink(),
    ),
    "a spoilt study": bad(
        "verdict runs/small",
        "runs/small/study.yaml: stud (line 1)",
        "did you mean 'study'?",
        file("runs/small/study.yaml", "stud: x"),
    ),
    "a plan of an unknown schema": bad(
        "verdict runs/small",
        ("runs/small/plan.json", "schema_version"),
        "the version that wrote it",
        file("runs/small/plan.json", '{"schema_version": 2}'),
    ),
}

DOCTOR = {
    "unknown option": bad("doctor --gpu", "No such option: --gpu", "Try 'coresident doctor --help'"),
    "an argument": bad("doctor runs/small", "extra argument", "Try 'coresident doctor --help'"),
}


def first(place: Path) -> str:
    """The name of the finished run's first record."""
    return min(path.stem for path in (place / "runs/small/records").glob("*-a1.json"))


@pytest.fixture
def refused(
    small: Path, place: Path, coresident: Callable[..., Any], listing: Callable[[Path], dict[str, str]]
) -> Iterator[Callable[..., None]]:
    """Calls a row, once with each of the given options more, and looks at all that must be so."""

    def check(row: Bad, *also: str) -> None:
        for given in row.given:
            given(place)
        name = first(place) if "RECORD" in row.call else ""
        call, says = ([word.replace("RECORD", name) for word in words] for words in (row.call, row.says))
        if row.call[0] == "init" and (place / "disk").exists():
            os.chdir(place / "disk")
        cut = call.index("--") if "--" in call else len(call)
        for option in ("", *also):
            if option in call and option:
                continue
            before = listing(place.parent)
            told = coresident(*call[:cut], *([option] if option else []), *call[cut:])
            assert told.status == 2, told
            assert told.out == ""
            sentence, _, below = (
                told.err.partition("\n  -> ") if "\n  -> " in told.err else (told.err, "", told.err)
            )
            for said in says:
                assert said in sentence
            assert row.remedy in below
            assert "\n  -> " in told.err or "Try 'coresident " in told.err
            if below is not told.err:
                assert sentence.startswith("coresident: ")
                assert sentence.count("\n") == 0 and below.count("\n") == 1
            assert listing(place.parent) == before

    yield check
    os.chdir(place.parent)
    if (place / "disk").is_mount():
        subprocess.run(["umount", str(place / "disk")], check=True)


def rows(table: dict[str, Bad]) -> pytest.MarkDecorator:
    """One test a row."""
    return pytest.mark.parametrize("row", table.values(), ids=table.keys())


@rows(RUN)
def test_run(row: Bad, refused: Callable[..., None]) -> None:
    refused(row, "--json", "--dry-run")


@rows(TRY)
def test_try(row: Bad, refused: Callable[..., None]) -> None:
    refused(row, "--json")


@rows(INIT)
def test_init(row: Bad, refused: Callable[..., None]) -> None:
    refused(row)


@rows(STUDIES)
def test_studies(row: Bad, refused: Callable[..., None]) -> None:
    refused(row, "--json")


@rows(SHOW)
def test_show(row: Bad, refused: Callable[..., None]) -> None:
    refused(row, "--json")


@rows(IMPORT)
def test_import(row: Bad, refused: Callable[..., None]) -> None:
    refused(row, "--json")


@rows(LOGS)
def test_logs(row: Bad, refused: Callable[..., None]) -> None:
    refused(row)


@rows(RECORDS)
def test_records(row: Bad, refused: Callable[..., None]) -> None:
    refused(row, *(["--json"] if "--csv" not in row.call else []))


@rows(RETRACT)
def test_retract(row: Bad, refused: Callable[..., None]) -> None:
    refused(row)


@rows(STATUS)
def test_status(row: Bad, refused: Callable[..., None]) -> None:
    refused(row, "--json")


@rows(VERDICT)
def test_verdict(row: Bad, refused: Callable[..., None]) -> None:
    refused(row, *(["--json"] if "--markdown" not in row.call else []))


@rows(DOCTOR)
def test_doctor(row: Bad, refused: Callable[..., None]) -> None:
    refused(row, "--json")


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        ("run s.yaml --json", "coresident init"),
        ("try -- true", QUOTE),
        ("retract runs/small one --why x", "did you mean 'one-"),
        ("verdict runs/smal --json", "such as runs/demo"),
        ("shwo runs/small", "Did you mean 'show'?"),
        ("--jsno", "Try 'coresident --help'"),
    ],
)
def test_real_processes(call: str, remedy: str, small: Path, place: Path) -> None:
    (place / "s.yaml").write_text("")
    argv = [sys.executable, "-m", "coresident", *call.split()]
    done = subprocess.run(argv, cwd=place, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert remedy in done.stderr
    assert "Traceback" not in done.stderr
