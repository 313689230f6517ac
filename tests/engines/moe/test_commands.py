"""`coresident moe layout` and `moe generate` as a user meets them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coresident.engines.moe.assemble import Engine
from coresident.engines.moe.commands import Text
from coresident.engines.moe.decoder.decoder import Decoder
from coresident.errors import UserError

Run = Callable[..., Any]


def greedy(model: Path, prompt: str, count: int) -> list[int]:
    """What transformers generates."""
    known = AutoTokenizer.from_pretrained(model)
    tokens = known(prompt, return_tensors="pt")
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made = loaded.generate(**tokens, max_new_tokens=count, do_sample=False)
    return [int(token) for token in made[0, tokens["input_ids"].shape[1] :]]


def test_generate_streams_text_and_says_what_it_cost(coresident: Run, tiny_model: Path) -> None:
    told = coresident(
        "moe",
        "generate",
        str(tiny_model),
        "--prompt",
        "The if statement",
        "--max-tokens",
        "12",
        "--slots",
        "3",
    )
    assert told.status == 0, told.err
    wanted = greedy(tiny_model, "The if statement", 12)
    text = AutoTokenizer.from_pretrained(tiny_model).decode(wanted, skip_special_tokens=True)
    assert told.out == text + "\n"
    assert "tok/s" in told.err and "hit rate" in told.err and "3 of 8 experts a layer" in told.err


def test_generate_as_json(coresident: Run, tiny_model: Path) -> None:
    told = coresident(
        "moe",
        "generate",
        str(tiny_model),
        "--prompt",
        "The if statement",
        "--max-tokens",
        "12",
        "--slots",
        "2",
        "--json",
    )
    found = json.loads(told.out)
    assert found["token_ids"] == greedy(tiny_model, "The if statement", 12)
    assert found["slots"] == [2, 2, 2, 2]
    assert found["hit_rate"] < 1 and found["bytes_per_token"] > 0 and found["tokens_per_second"] > 0


def test_a_batch_of_prompts(coresident: Run, tiny_model: Path) -> None:
    words = ["moe", "generate", str(tiny_model), "--max-tokens", "8", "--slots", "4", "--json"]
    both = json.loads(coresident(*words, "--prompt", "The if", "--prompt", "A class statement").out)
    assert both["token_ids"] == [greedy(tiny_model, one, 8) for one in ("The if", "A class statement")]


def test_a_batch_that_needs_more_experts_than_slots_says_what_it_moved(
    coresident: Run, tiny_model: Path
) -> None:
    prompts = [word for text in ("The if", "A class", "x = 3", "import", "12") for word in ("--prompt", text)]
    words = ["moe", "generate", str(tiny_model), "--max-tokens", "8", "--slots", "2", "--json"]
    found = json.loads(coresident(*words, *prompts).out)
    assert found["hit_rate"] < 1 and found["bytes_per_token"] > 0


def test_a_text_is_whole_where_the_tokenizer_changes_what_it_said() -> None:
    class Tidy:
        """Takes the space before a full stop away."""

        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            return "".join("ab ."[token] for token in tokens).replace(" .", ".")

    shown: list[str] = []
    text = Text(Tidy(), shown.append, set())
    for token in (0, 2, 3, 1, 1):
        text.add(token)
    text.finish()
    assert text.text == "a.bb"


def test_layout_then_generate_from_a_cold_disk(coresident: Run, tiny_model: Path, place: Path) -> None:
    made = coresident("moe", "layout", str(tiny_model), "experts", "--json")
    assert json.loads(made.out)["records"] == 32
    assert coresident("moe", "layout", str(tiny_model), "experts", "--check").status == 0
    words = [
        "moe",
        "generate",
        str(tiny_model),
        "--prompt",
        "The if",
        "--max-tokens",
        "8",
        "--slots",
        "2",
        "--json",
    ]
    found = json.loads(coresident(*words, "--layout", "experts", "--tier", "disk").out)
    assert found["token_ids"] == greedy(tiny_model, "The if", 8)
    assert found["tier"] == "disk"
    content = bytearray((place / "experts").read_bytes())
    content[-5000] ^= 1
    (place / "experts").write_bytes(content)
    told = coresident("moe", "layout", str(tiny_model), "experts", "--check")
    assert told.status == 2 and "bad checksum" in told.err
    told = coresident(*words, "--layout", "experts")
    assert told.status == 2 and "bad checksum" in told.err


def test_a_chat_prompt_goes_through_the_template(coresident: Run, tiny_model: Path) -> None:
    words = ["moe", "generate", str(tiny_model), "--max-tokens", "4", "--json", "--prompt"]
    plain = json.loads(coresident(*words, "hello").out)
    chat = json.loads(coresident(*words, "hello", "--chat").out)
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert chat["prompt_tokens"] > plain["prompt_tokens"]
    assert chat["token_ids"] == json.loads(coresident(*words, rendered).out)["token_ids"]


def test_a_chat_template_that_fails_is_named(coresident: Run, tiny_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    told = coresident("moe", "generate", str(model), "--prompt", "hello", "--chat")
    assert told.status == 2 and "chat template fails: roles must alternate" in told.err


def test_without_a_number_a_text_fills_the_context(coresident: Run, tiny_model: Path) -> None:
    found = json.loads(coresident("moe", "generate", str(tiny_model), "--prompt", "The if", "--json").out)
    assert found["prompt_tokens"] + len(found["token_ids"]) == 96


def test_a_stop_token_ends_the_text(coresident: Run, tiny_model: Path) -> None:
    words = ["moe", "generate", str(tiny_model), "--prompt", "The if", "--max-tokens", "12", "--json"]
    tokens = json.loads(coresident(*words).out)["token_ids"]
    known = AutoTokenizer.from_pretrained(tiny_model)
    stop = known.convert_ids_to_tokens(tokens[0])
    found = json.loads(coresident(*words, "--stop", stop).out)
    assert found["token_ids"] == tokens[:1] and found["text"] == ""


def test_what_fails_before_the_first_token_leaves_nothing_open(
    coresident: Run, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card warms up by compiling and capturing, for which memory may be short."""
    order: list[str] = []
    close = Engine.close

    def refused(*_: Any) -> None:
        order.append("warm")
        raise UserError("no room to warm up", "make room")

    def closed(self: Engine) -> None:
        order.append("closed")
        close(self)

    monkeypatch.setattr(Decoder, "warm", refused)
    monkeypatch.setattr(Engine, "close", closed)
    told = coresident("moe", "generate", str(tiny_model), "--prompt", "The if")
    assert told.status == 2 and "no room to warm up" in told.err
    assert order == ["warm", "closed"]


MISTAKES: list[tuple[list[str], str, str]] = [
    (["--slots", "1"], "1 slots cannot hold the 2 experts that one token needs", "give at least 2 slots"),
    (["--slots", "9"], "more than its 8 experts", "give at most 8"),
    (["--device-memory", "10KiB"], "is too small", "give at least"),
    (["--device-memory", "much"], "is no size", "6GiB"),
    (["--max-tokens", "1000"], "beyond the model's context of 96", "smaller --max-tokens"),
    (["--layout", "none"], "none does not exist", "coresident moe layout"),
    (["--bits", "3"], "--bits 3 is not kept", "give 4"),
    (["--bits", "4"], "do not divide rows of 32 and 24", "leave --bits out"),
    (["--slots", "2", "--device-memory", "1GiB"], "exclude each other", "drop slots or device_memory"),
    (["--policy", "static"], "needs a ranking of the experts", "--set popularity=FILE"),
    (
        ["--policy", "static", "--set", "popularity=none.json"],
        "none.json cannot be read: No such file or directory ->",
        "the popularity.json of `moe fit-predictor --kind static --out`",
    ),
    (["--layout", "."], ". is a directory, and expert records are a file", "name the file"),
    (["--tier", "tape"], "tier", "pinned"),
    (["--stop", "several tokens"], "tokens, not one", "one token"),
    (["--host-memory", "1GiB"], "host_memory", "--tier disk"),
    (["--set", "model.path=/nowhere"], "config.json does not exist", "Hugging Face directory"),
    (["--set", "tokens=9"], "tokens is a parameter of measuring", "--max-tokens"),
    (["--set", "prompts.follow=true"], "prompts is a parameter of measuring", "leave it out"),
]


@pytest.mark.parametrize(("words", "problem", "remedy"), MISTAKES, ids=lambda value: str(value)[:30])
def test_a_mistake_is_one_sentence_with_a_remedy(
    words: list[str], problem: str, remedy: str, coresident: Run, tiny_model: Path
) -> None:
    told = coresident("moe", "generate", str(tiny_model), "--prompt", "The if", "--max-tokens", "4", *words)
    assert told.status == 2
    said = " ".join(told.err.split())
    assert problem in said and remedy in said
    assert "Traceback" not in said and told.out == ""


def test_a_layout_of_another_model_is_refused(
    coresident: Run, tiny_model: Path, saved: Callable[[str], Path]
) -> None:
    assert coresident("moe", "layout", str(saved("olmoe")), "other").status == 0
    told = coresident(
        "moe", "generate", str(tiny_model), "--prompt", "x", "--layout", "other", "--max-tokens", "4"
    )
    assert told.status == 2 and "holds the experts of another model" in told.err
    told = coresident("moe", "layout", str(tiny_model), "other", "--check")
    assert told.status == 2 and "another model" in told.err


def test_a_place_that_will_not_do_for_a_layout(coresident: Run, tiny_model: Path, place: Path) -> None:
    (place / "models").mkdir()
    told = coresident("moe", "layout", str(tiny_model), "models")
    assert told.status == 2 and "models is a directory" in told.err and "models/experts.records" in told.err
    (place / "notes").write_text("not records")
    told = coresident("moe", "layout", str(tiny_model), "notes")
    assert told.status == 2 and "notes is no file of expert records" in told.err
    assert "choose another OUT" in told.err and (place / "notes").read_text() == "not records"
    assert sorted(path.name for path in place.iterdir()) == ["models", "notes"]


def test_a_file_is_no_model(coresident: Run, place: Path) -> None:
    (place / "afile").write_text("{}")
    for words in (
        ["generate", "afile", "--prompt", "x"],
        ["layout", "afile", "out"],
        ["trace", "afile", "--out", "t"],
    ):
        told = coresident("moe", *words)
        assert told.status == 2 and "afile is a file, and a model is a directory" in told.err
        assert "give a Hugging Face directory" in told.err and "Errno" not in told.err


def test_a_directory_without_weights_or_tokenizer(coresident: Run, tiny_model: Path, place: Path) -> None:
    (place / "half").mkdir()
    told = coresident("moe", "generate", "half", "--prompt", "x")
    assert told.status == 2 and "config.json does not exist" in told.err
    (place / "half" / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    told = coresident("moe", "generate", "half", "--prompt", "x")
    assert told.status == 2 and "holds neither model.safetensors nor" in told.err
    (place / "half" / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes())
    told = coresident("moe", "generate", "half", "--prompt", "x")
    assert told.status == 2 and "has no tokenizer" in told.err
