"""The commands as a user meets them: text in, a model that transformers loads out; each bad input one sentence."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coresident.engines.pretrain.directory import METRICS, lines
from coresident.engines.pretrain.update import Losses
from coresident.text import manifest
from coresident.text.cache import TokenCache

CONFIG = """\
shape: {vocabulary: 300, layers: 1, width: 16, heads: 2, feedforward: 24, context: 16}
data: {cache_dir: CACHE}
batch_tokens: 64
microbatch: 4
budget: {updates: 30, virtual_epochs: 3}
runtime: {threads: 1}
"""


@pytest.fixture
def config(cache: TokenCache, place: Path) -> Path:
    file = place / "recipe.yaml"
    file.write_text(CONFIG.replace("CACHE", str(cache.path)))
    return file


def train(coresident: Callable[..., Any], *more: str) -> Any:
    return coresident("pretrain", "train", "--config", "recipe.yaml", "--out", "run", *more)


def test_train_evaluate_export_as_three_commands(
    coresident: Callable[..., Any], config: Path, place: Path
) -> None:
    told = train(coresident, "--set", "optimiser.learning_rate=0.02")
    assert (told.status, told.err) == (0, "")
    assert "validation (all) loss" in told.out and "100.0 %" in told.out and "targets/s" in told.out
    told = coresident("pretrain", "evaluate", "run", "--batch", "3", "--json")
    found = json.loads(told.out)
    assert told.status == 0
    result = json.loads((place / "run" / "result.json").read_text())
    assert found["loss"] == pytest.approx(result["validation"]["loss"], rel=1e-6)
    assert found["families"].keys() == found["unigram"]["families"].keys() == {"code", "prose"}
    subset = json.loads(coresident("pretrain", "evaluate", "run", "--subset", "64", "--json").out)
    assert subset["targets"] < found["targets"]
    told = coresident("pretrain", "export", "run", "--out", "model")
    assert (told.status, told.err) == (0, "")
    agrees(place / "run", place / "model")


def agrees(run: Path, model: Path) -> None:
    """transformers' logits are ours, and it generates."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from coresident.engines.pretrain import commands, directory

    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    _, ours = commands.load(run, directory.saved(run))
    tokens = torch.tensor([tokenizer.encode("def main(argv):\n")[:8]])
    with torch.no_grad():
        torch.testing.assert_close(
            ours.logits(ours(tokens).hidden), theirs(tokens).logits, rtol=1e-4, atol=1e-5
        )
    said = theirs.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    assert said.shape == (1, tokens.shape[1] + 4)


def test_a_mixture_of_experts_reaches_transformers_too(
    coresident: Callable[..., Any], config: Path, place: Path
) -> None:
    dense = "feedforward: 24"
    sparse = "qk_norm: true, mixture: {experts: 4, top_k: 2, width: 12}"
    config.write_text(config.read_text().replace(dense, sparse))
    assert train(coresident).status == 0
    assert coresident("pretrain", "export", "run", "--out", "model").status == 0
    assert json.loads((place / "model" / "config.json").read_text())["model_type"] == "olmoe"
    agrees(place / "run", place / "model")


def test_json_is_the_result_and_nothing_else(
    coresident: Callable[..., Any], config: Path, place: Path
) -> None:
    told = train(coresident, "--json", "--set", "budget.updates=3")
    assert json.loads(told.out) == json.loads((place / "run" / "result.json").read_text())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_keeps_the_state_and_resume_ends_where_an_uninterrupted_run_does(
    coresident: Callable[..., Any], config: Path, place: Path, number: int
) -> None:
    config.write_text(config.read_text().replace("updates: 30", "updates: 150"))
    argv = [
        sys.executable,
        "-m",
        "coresident",
        "pretrain",
        "train",
        "--config",
        "recipe.yaml",
        "--out",
        "run",
    ]
    process = subprocess.Popen(argv, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while len(lines(place / "run" / METRICS)) < 12 and time.monotonic() < until:
        time.sleep(0.005)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert "stopping after the current update" in out and "with --resume" in out
    stopped = json.loads((place / "run" / "result.json").read_text())
    assert stopped["status"] == "stopped" and 0 < stopped["checkpoint_update"] < 150
    again = coresident("pretrain", "train", "--resume", "--out", "run")
    assert (again.status, again.err) == (0, "")
    assert "going on after" in again.out
    coresident("pretrain", "train", "--config", "recipe.yaml", "--out", "whole")
    one, other = (json.loads((place / name / "result.json").read_text()) for name in ("run", "whole"))
    assert one["weights"] == other["weights"]
    updates = [row["update"] for row in lines(place / "run" / METRICS) if "loss" in row]
    assert updates == list(range(1, 151))


def test_a_stop_before_the_first_update_keeps_nothing_and_says_so(
    coresident: Callable[..., Any], config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coresident.engines.pretrain import commands

    opened = commands.open_cache

    def interrupted(*given: Any) -> TokenCache:
        os.kill(os.getpid(), signal.SIGINT)
        return opened(*given)

    monkeypatch.setattr(commands, "open_cache", interrupted)
    told = train(coresident)
    assert (told.status, told.err) == (130, "")
    assert "stopped after update 0: no state is kept, so that --resume begins anew" in told.out
    assert "kept after" not in told.out
    monkeypatch.setattr(commands, "open_cache", opened)
    assert coresident("pretrain", "train", "--resume", "--out", "run").status == 0


def test_an_interrupt_is_told_with_what_is_true_of_the_command(
    coresident: Callable[..., Any], config: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where something is kept does it go on."""
    assert train(coresident, "--set", "budget.updates=2").status == 0

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Losses, "__call__", interrupted)
    told = coresident("pretrain", "evaluate", "run")
    assert (told.status, told.err) == (130, "coresident: interrupted\n  -> repeat the command\n")
    told = coresident("pretrain", "train", "--config", "recipe.yaml", "--out", "other")
    assert told.status == 130 and "no state is kept, so that --resume begins anew" in told.err
    told = coresident("pretrain", "train", "--resume", "--out", "run", "--set", "validation.subset=16")
    assert told.status == 0, "it is trained already"


def test_what_takes_more_memory_than_there_is_does_not_start(
    coresident: Callable[..., Any], config: Path, place: Path
) -> None:
    """More than any machine has, so that nothing needs to be feigned."""
    more = (
        "--set",
        "batch_tokens=268435456",
        "--set",
        "microbatch=16777216",
        "--set",
        "shape.vocabulary=65536",
    )
    told = train(coresident, *more)
    assert told.status == 2
    first, second = told.err.splitlines()
    assert "this training takes at least" in first and "microbatch 16777216" in first
    assert "set microbatch to " in second and "runtime.loss_chunk" in second
    assert not (place / "run").exists()


def flip(file: Path) -> None:
    """Change one bit of its last number."""
    content = bytearray(file.read_bytes())
    content[-4] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "cut", [lambda file: file.write_bytes(file.read_bytes()[:1000]), lambda file: file.unlink(), flip]
)
def test_a_finished_training_whose_weights_are_damaged_is_not_called_trained(
    coresident: Callable[..., Any], config: Path, place: Path, cut: Callable[[Path], Any]
) -> None:
    assert train(coresident, "--set", "budget.updates=2").status == 0
    again = ("pretrain", "train", "--resume", "--out", "run")
    assert "it is trained already: nothing is left to do" in coresident(*again).out
    cut(next((place / "run" / "checkpoints").glob("*/model.safetensors")))
    for words in (again, ("pretrain", "evaluate", "run"), ("pretrain", "export", "run", "--out", "model")):
        told = coresident(*words)
        assert told.status == 2 and "model.safetensors is damaged" in told.err
        assert "remove it, and `train --resume` begins anew" in told.err
    assert not (place / "model").exists()
    # The remedy is true.
    shutil.rmtree(place / "run" / "checkpoints" / "update-00000002")
    assert coresident(*again).status == 0


def test_the_built_in_corpus_says_where_it_is_written_and_how_far_it_is(
    cache: TokenCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coresident.engines.pretrain import commands
    from coresident.engines.pretrain.parameters import Train

    def made(settings: Any, out: Path, workers: int, progress: Any, say: Any) -> TokenCache:
        progress(20e6, 0, "bytes of text")
        return cache

    monkeypatch.setenv(commands.CACHE, str(tmp_path))
    monkeypatch.setattr(commands, "make_cache", made)
    said: list[str] = []
    commands.open_cache(Train(), said.append)
    assert f"preparing the built-in corpus in {tmp_path / 'tokens'}" in said[0]
    assert said[1:] == ["20,000,000 bytes of text"]


@pytest.mark.parametrize(
    ("words", "said", "remedy"),
    [
        (("--set", "data.cache_dir=recipe.yaml"), "recipe.yaml is not a token cache: it is no directory", "name the --out"),
        (("--set", "data.cache_dir=."), " is not a token cache: it has no manifest.json", "name the --out"),
        (("--set", "seed"), "--set seed: not of the form", "--set seed=VALUE"),
        (("--out", "recipe.yaml"), "recipe.yaml is no directory", "choose another --out"),
        (("--out", "."), ". holds 'recipe.yaml' and no training", "an empty one"),
        (("--set", "data.cache_dir=nowhere"), "nowhere is not a token cache", "pretrain prepare"),
        (("--set", "batch_tokens=100"), "batch_tokens 100 is no whole number of sequences of 16", "96 or 112"),
        (("--set", "microbatch=3"), "microbatch 3 does not divide the 4 sequences", "microbatch to 2"),
        (("--set", "optimiser.lerning_rate=1"), "unknown key 'lerning_rate'", "learning_rate"),
        (("--set", "optimiser.learning_rate=fast"), "must be a number", "correct"),
        (("--set", "budget.targets=5"), "give one of targets and updates", "correct"),
        (("--set", "shape.qk_norm=true"), "shape: transformers has no such model", "without qk_norm"),
        (
            ("--set", "shape.feedforward=null", "--set", "shape.mixture={experts: 4, top_k: 2, width: 12}"),
            "shape: transformers has no such model", "a mixture with it",
        ),
        (("--set", "shape.width=9223372036854775808"), "less than or equal to 1048576", "correct"),
        (("--set", "shape.layers=1000000000"), "less than or equal to 4096", "correct"),
        (("--set", "runtime.threads=100000"), "less than or equal to 1024", "correct"),
        (("--set", "runtime.loss_chunk=9223372036854775808"), "less than or equal to 2147483648", "correct"),
        (("--set", "budget.updates=null", "--set", "budget.per_parameter=1e308"), "less than or equal to 1000000000", "correct"),
        (("--set", "optimiser.learning_rate=1e38"), "less than or equal to 1000000", "correct"),
        (("--set", "batch_tokens=1099511627776"), "less than or equal to 268435456", "correct"),
        (("--set", "shape.heads=3"), "width 16 is not divisible by 3 heads", "correct"),
        (("--set", "shape.vocabulary=200"), "has 300 tokens, and the model's table only 200", "vocabulary=200"),
        (("--preset", "20n"), "no model preset '20n'", "20m"),
        (("--set", "runtime.sdpa_backend=cudnn"), "the cudnn attention kernel cannot run", "auto"),
        (("--resume",), "run holds no training", "--out"),
        (("--config", "none.yaml"), "none.yaml cannot be read: No such file or directory", "YAML"),
        (("--device", "cuda"), "", ""),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence_with_a_remedy(
    coresident: Callable[..., Any], config: Path, words: tuple[str, ...], said: str, remedy: str
) -> None:
    if words == ("--device", "cuda") and torch.cuda.is_available():
        pytest.skip("this machine has a card")
    told = train(coresident, *words)
    assert told.status == 2
    first, second = told.err.splitlines()
    assert said in first and remedy in second
    assert told.out == ""


@pytest.mark.parametrize("what", ["manifest", "size", "missing", "checksum"])
def test_a_cache_that_is_not_what_it_was_is_refused(
    coresident: Callable[..., Any], config: Path, cache: TokenCache, place: Path, what: str
) -> None:
    copy = place / "copy"
    shutil.copytree(cache.path, copy)
    shard = next(one for one in sorted(copy.iterdir()) if one.stem.startswith("train"))
    if what == "manifest":
        file = copy / "manifest.json"
        file.write_text(file.read_text().replace('"vocabulary": 300', '"vocabulary": 299'))
    elif what == "size":
        shard.write_bytes(shard.read_bytes()[:-2])
    elif what == "missing":
        shard.unlink()
    else:
        shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    told = train(coresident, "--set", f"data.cache_dir={copy}")
    assert told.status == 2
    assert len(told.err.splitlines()) == 2 and str(copy) in told.err


def test_a_run_directory_in_use_or_of_another_recipe_is_refused(
    coresident: Callable[..., Any], config: Path, place: Path
) -> None:
    assert train(coresident, "--set", "budget.updates=3").status == 0
    told = train(coresident)
    assert told.status == 2 and "holds a training already" in told.err
    told = coresident("pretrain", "train", "--out", "run", "--resume", "--set", "seed=4")
    assert told.status == 2 and "of another recipe: seed was 0 and is now 4" in told.err
    from filelock import FileLock

    with FileLock(place / "run" / ".lock"):
        told = coresident("pretrain", "train", "--out", "run", "--resume")
    assert told.status == 2 and "another process is training into run" in told.err


def test_evaluate_and_export_need_a_checkpoint(coresident: Callable[..., Any], config: Path) -> None:
    assert "holds no training" in coresident("pretrain", "evaluate", "none").err
    assert (
        "recipe.yaml is no directory\n  -> name the --out"
        in coresident("pretrain", "evaluate", "recipe.yaml").err
    )
    train(coresident, "--set", "checkpoints.policy=none", "--set", "budget.updates=2")
    for words in (("evaluate", "run"), ("export", "run", "--out", "model")):
        told = coresident("pretrain", *words)
        assert told.status == 2 and "run holds no checkpoint" in told.err


def test_prepare_says_what_it_made_and_refuses_what_is_no_text(
    coresident: Callable[..., Any], place: Path
) -> None:
    (place / "good.txt").write_text("A short text. " * 400)
    (place / "held.txt").write_text("Another one. " * 10)
    words = (
        "--set",
        "source={kind: files, files: {prose: [good.txt]}, separator: '. ', validation: {prose: [held.txt]}}",
        "--set",
        "vocabulary=300",
    )
    told = coresident("pretrain", "prepare", "--out", "cache", "--workers", "1", "--json", *words)
    assert told.status == 0
    assert json.loads(told.out)["vocabulary"] <= 300
    told = coresident("pretrain", "prepare", "--out", "cache", "--workers", "1", *words)
    assert told.status == 2 and "is already there" in told.err
    told = coresident("pretrain", "prepare", "--out", "/proc/cache", "--workers", "1", *words)
    assert told.status == 2 and "/proc/cache cannot be written: No such file" in told.err
    words = (*words[:-1], "vocabulary=32000")
    told = coresident("pretrain", "prepare", "--out", "more", "--workers", "1", *words)
    assert told.status == 0 and "tokens, not 32,000: there is no more to merge" in told.out
    (place / "bad.txt").write_bytes(b"\x00\xff\xfe" * 100)
    (place / "empty.txt").write_text("")
    for name in ("bad", "empty", "none"):
        source = f"source={{kind: files, files: {{prose: [{name}.txt]}}}}"
        told = coresident("pretrain", "prepare", "--out", "other", "--workers", "1", "--set", source)
        assert told.status == 2 and len(told.err.splitlines()) == 2, name
        assert not (place / "other").exists()
    told = coresident("pretrain", "prepare", "--out", "other", "--set", "vocabulary=70000")
    assert told.status == 2 and "vocabulary" in told.err


def test_prepare_says_which_files_of_a_directory_are_left_out(
    coresident: Callable[..., Any], place: Path
) -> None:
    (place / "text" / "deep").mkdir(parents=True)
    (place / "text" / "good.txt").write_text("A short text. " * 400)
    words = ("--workers", "1", "--set", "vocabulary=300", "--set", "source.kind=files")
    words = ("pretrain", "prepare", *words, "--set", "source.validation_share=0")
    words = (*words, "--set", "source.files={prose: [text]}")
    told = coresident(*words, "--out", "all")
    assert told.status == 0 and "left" not in told.out
    assert "left_out" not in json.loads(coresident(*words, "--out", "all2", "--json").out)
    for name in ("a.png", "deep/b.PNG", "c.pdf", "d.csv.gz"):
        (place / "text" / name).write_bytes(b"\0")
    told = coresident(*words, "--out", "some")
    assert told.status == 0
    assert "left out: 4 files of kinds that are not read (.png 2, .pdf 1, .csv.gz 1)" in told.out.splitlines()
    told = json.loads(coresident(*words, "--out", "some2", "--json").out)
    assert told["left_out"] == {"prose": {".png": 2, ".pdf": 1, ".csv.gz": 1}}
    (place / "text" / "good.txt").unlink()
    told = coresident(*words, "--out", "none")
    assert told.status == 2 and "text holds no text\n  -> give files that end in .txt" in told.err


@pytest.mark.slow
def test_from_nothing_to_a_model_that_transformers_loads(place: Path) -> None:
    """The built-in corpus and the smoke preset, with the commands as they are documented."""

    def called(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "coresident", "pretrain", *words],
            cwd=place,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout

    called("prepare", "--out", "cache")
    # Two thirds of the preset's.
    called("train", "--set", "data.cache_dir=cache", "--set", "budget.updates=150", "--out", "run")
    found = json.loads(called("evaluate", "run", "--json"))
    called("export", "run", "--out", "model")
    assert found["loss"] < found["unigram"]["loss"] - 0.5
    for family, loss in found["families"].items():
        assert loss < found["unigram"]["families"][family]
    agrees(place / "run", place / "model")


@pytest.mark.parametrize("what", ["text", "tokenizer"])
def test_another_cache_in_the_place_of_the_trainings_own_is_refused(
    coresident: Callable[..., Any], config: Path, cache: TokenCache, place: Path, what: str
) -> None:
    own, given = place / "own", place / "given"
    shutil.copytree(cache.path, own)
    shutil.copytree(cache.path, given)
    assert train(coresident, "--set", "budget.updates=2", "--set", f"data.cache_dir={own}").status == 0
    change(own, what)
    change(given, what)
    evaluated = coresident("pretrain", "evaluate", "run")
    assert (
        evaluated.status == 2
        and f"{own} " in evaluated.err
        and "that run was trained" in evaluated.err.replace("than run", "that run")
    )
    elsewhere = coresident("pretrain", "evaluate", "run", "--cache", str(given), "--json")
    exported = coresident("pretrain", "export", "run", "--out", "model")
    if what == "text":
        # The tokens mean the same, so either makes sense.
        assert (elsewhere.status, exported.status) == (0, 0)
    else:
        assert "given has another tokenizer than run was trained with" in elsewhere.err
        assert "own has another tokenizer than run was trained with" in exported.err
        assert (elsewhere.status, exported.status) == (2, 2) and not (place / "model").exists()


def change(cache: Path, what: str) -> None:
    """Make it another whole cache: of other text (as far as its manifest tells), or of another tokenizer."""
    described = manifest.read(cache)
    if what == "text":
        first, *others = described.streams
        first = first.model_copy(update={"documents": first.documents + 1})
        described = described.model_copy(update={"streams": (first, *others)})
    else:
        file = cache / manifest.TOKENIZER / "tokenizer.json"
        file.write_text(file.read_text() + "\n")
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        tokenizer = {**described.tokenizer, "tokenizer.json": found}
        described = described.model_copy(update={"tokenizer": tokenizer})
    (cache / manifest.FILE).write_bytes(manifest.render(described))


def test_an_evaluation_that_memory_does_not_hold_says_which_batch_to_try(
    coresident: Callable[..., Any], config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(coresident, "--set", "budget.updates=2").status == 0

    def full(*_: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 10 bytes")

    monkeypatch.setattr(Losses, "__call__", full)
    told = coresident("pretrain", "evaluate", "run", "--batch", "48")
    assert told.status == 2
    first, second = told.err.splitlines()
    assert "memory ran out" in first and "set --batch to 24 (it is 48)" in second


def test_a_training_that_nobody_hears_goes_on_to_its_end(config: Path, place: Path) -> None:
    argv = [sys.executable, "-m", "coresident", "pretrain", "train", "--config", "recipe.yaml", "--out"]
    reader, writer = os.pipe()
    os.close(reader)
    with Path("/dev/full").open("wb") as full, os.fdopen(writer, "wb") as closed:
        started = {
            name: subprocess.Popen([*argv, name], cwd=place, stdout=stream, stderr=subprocess.PIPE, text=True)
            for name, stream in (("full", full), ("closed", closed))
        }
    for name, process in started.items():
        _, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (0, "")
        assert json.loads((place / name / "result.json").read_text())["status"] == "done"


def test_an_interrupted_prepare_says_that_it_begins_anew(coresident: Callable[..., Any], place: Path) -> None:
    os.mkfifo(place / "endless.txt")
    words = ("pretrain", "prepare", "--out", "cache", "--set", "source.kind=files", "--set", "vocabulary=300")

    def interrupt() -> None:
        with (place / "endless.txt").open("wb"):  # waits until it is read
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)

    thread = threading.Thread(target=interrupt)
    thread.start()
    told = coresident(*words, "--set", "source.files={web: [endless.txt]}")
    thread.join()
    assert told.status == 130
    assert "nothing of cache is kept" in told.err and "begins anew" in told.err
    assert not (place / "cache").exists() and not (place / "cache.partial").exists()
    # A killed one leaves what it had.
    (place / "cache.partial").mkdir()
    (place / "good.txt").write_text("A short text. " * 400)
    more = ("--set", "source.files={web: [good.txt]}", "--set", "source.validation_share=0")
    told = coresident(*words, *more, "--workers", "1")
    assert told.status == 0 and "did not end: beginning anew" in told.out
