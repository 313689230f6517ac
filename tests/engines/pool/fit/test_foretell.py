"""`coresident pool fit`: how much, of what, how many fit, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from coresident.cli.pool import pool
from coresident.engines.pool.fit import architecture, foretell
from coresident.engines.pool.fit.predict import PARTS
from coresident.engines.pool.parameters import DPO
from coresident.errors import UserError

GIB = 2**30


def asked(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(pool, ["fit", *arguments])
    if isinstance(result.exception, UserError):
        raise result.exception
    return result.exit_code, result.stdout


def found(*arguments: str) -> dict[str, Any]:
    _, text = asked(*arguments, "--json")
    told: dict[str, Any] = json.loads(text)
    return told


SMALL = ("--config", "qwen2.5-0.5b")


@pytest.mark.parametrize("arm", ["native", "fork", "packed"])
def test_the_largest_number_fits_and_one_more_does_not(arm: str) -> None:
    told = found(*SMALL, "--arm", arm, "--device-memory", "40GiB")
    largest = told["largest"]
    assert largest > 1
    some = found(*SMALL, "--arm", arm, "--device-memory", "40GiB", "--learners", f"{largest},{largest + 1}")
    assert [one["fits"] for one in some["points"]] == [True, False]
    assert all(one["total"] == sum(one["parts"].values()) for one in some["points"])
    assert set(some["points"][0]["parts"]) == set(PARTS)


def test_numbers_below_the_largest_that_do_not_fit_are_told() -> None:
    options = (*SMALL, "--arm", "packed", "--row-tokens", "37", "--set", "checkpointing=true")
    options += ("--device-memory", "4.7GiB", "--learners", "10,11,12,13,14,15")
    status, text = asked(*options)
    told = found(*options)
    assert status == 1
    fitting = [one["learners"] for one in told["points"] if one["fits"]]
    assert (fitting, told["largest"], told["misfits"]) == ([10, 13, 14], 14, [11, 12])
    assert "14 learners fit into 4.70 GiB, and 11, 12 do not" in text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"model_type": "mistral", "sliding_window": 16}, 16),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, 16),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}, None),
        ({"use_sliding_window": True, "sliding_window": 48}, None),
        ({"use_sliding_window": False, "sliding_window": 16}, None),
        ({"use_sliding_window": True, "sliding_window": 16, "layer_types": ["full_attention"] * 2}, None),
    ],
)
def test_a_window_is_refused_where_the_pack_refuses_it(more: dict[str, Any], said: int | None) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {"model_type": "qwen2", "num_hidden_layers": 2, **more}
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config, **sizes, vocab_size=8))
    attentions = [module for module in model.modules() if hasattr(module, "sliding_window")] or [model.config]
    windows = {one.sliding_window for one in attentions if one.sliding_window is not None}
    assert {window for window in windows if window < 48} == ({said} - {None}), "as transformers has it"
    if said is None:
        architecture.check_packed(config, 48)
    else:
        with pytest.raises(UserError, match=f"attends within {said} of 48 tokens"):
            architecture.check_packed(config, 48)


def test_forked_learners_save_a_base_each_and_packed_ones_their_contexts_too() -> None:
    told = {arm: found(*SMALL, "--arm", arm, "--learners", "8,9") for arm in ("native", "fork", "packed")}
    more = {arm: one["points"][1]["total"] - one["points"][0]["total"] for arm, one in told.items()}
    base = told["fork"]["base"]
    assert more["native"] - more["fork"] == pytest.approx(base, rel=0.15)
    assert more["fork"] - more["packed"] > 700 * 2**20
    contexts = {arm: one["points"][0]["parts"]["contexts"] / 2**20 for arm, one in told.items()}
    assert contexts["packed"] < 1000 < contexts["fork"] / 5


@pytest.mark.parametrize("mps", ["off", "on"])
@pytest.mark.parametrize("arm", ["native", "fork"])
def test_a_deterministic_runs_contexts_lack_what_it_never_loads(arm: str, mps: str) -> None:
    def contexts(deterministic: str) -> float:
        options = ("--set", f"deterministic={deterministic}", "--set", f"mps={mps}", "--learners", "8,9")
        one, more = (point["parts"]["contexts"] for point in found(*SMALL, "--arm", arm, *options)["points"])
        return float(more - one)

    # Its allocator's memory grows all the same: scores of all pairs of tokens are made.
    assert contexts("false") - contexts("true") == pytest.approx(80 * 2**20, rel=0.01)


def test_what_makes_room() -> None:
    plain = found(*SMALL)["largest"]
    for change in ("checkpointing=true", "base.quantise=nf4", "optimizer=adamw8bit", "rank=4", "mps=on"):
        assert found(*SMALL, "--set", change)["largest"] >= plain
    assert found(*SMALL, "--row-tokens", "32")["largest"] > plain
    assert found(*SMALL, "--set", "max_length=1024")["largest"] < plain


def test_the_runs_of_pool_high_n_take_at_most_what_they_are_to() -> None:
    given = ("checkpointing=true", "base.quantise=nf4", "optimizer=adamw8bit", "data.source=arithmetic")
    more = ("dtype=bfloat16", "adapter_products=bfloat16")
    options = [word for one in (*given, *more) for word in ("--set", one)]
    for point in found("--config", "qwen2.5-7b", "--learners", "16,32", *options)["points"]:
        assert point["total"] <= (6500 + point["learners"] * 1500) * 2**20


def test_a_base_in_4_bits_is_as_small_as_it_will_be() -> None:
    told = found("--config", "qwen2.5-7b", "--set", "base.quantise=nf4", "--learners", "1")
    assert told["nf4"]
    assert 5.0 < told["base"] / GIB < 5.2
    assert told["points"][0]["parts"]["transients"] > 0


def test_a_directory_and_its_data(tiny_base: Path, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    line = {"prompt": "What is 2 + 2?", "chosen": " It is 4.", "rejected": " It is 5, I think."}
    file.write_text(f"{json.dumps(line)}\n" * 4)
    told = found("--base", str(tiny_base), "--data", str(file), "--learners", "2")
    assert told["rows"].startswith("4 a step, of up to ")
    longer = found("--base", str(tiny_base), "--learners", "2")
    assert "all of 256 tokens" in longer["rows"]
    held = [
        sum(one["points"][0]["parts"][kind] for kind in ("activations", "logits")) for one in (told, longer)
    ]
    assert held[0] < held[1]


def test_the_table_and_the_exit_status() -> None:
    status, text = asked("--config", "qwen2.5-1.5b", "--arm", "native", "--learners", "8,64")
    assert status == 1
    assert "does not fit" in text.splitlines()[-3]
    assert text.splitlines()[-1].endswith("learners fit into 80.00 GiB")
    status, text = asked(*SMALL, "--learners", "2")
    assert status == 0
    status, text = asked("--config", "qwen2.5-7b", "--device-memory", "8GiB")
    assert (status, text.splitlines()[-1]) == (0, "not one learner fits into 8.00 GiB")


def test_mps_serves_no_more_than_it_does() -> None:
    many = (
        *SMALL,
        "--row-tokens",
        "16",
        "--set",
        "mps=on",
        "--set",
        "checkpointing=true",
        "--device-memory",
        "140GiB",
    )
    assert found(*many)["largest"] == 47
    assert found(*many, "--arm", "native")["largest"] == 48
    with pytest.raises(UserError, match="MPS serves"):
        asked(*many, "--learners", "64")


def test_the_documentation_shows_what_is_printed() -> None:
    text = (Path(__file__).parents[4] / "docs" / "pool.md").read_text(encoding="utf-8")
    command, _, printed = text.partition("coresident pool fit ")[2].partition("\n```\n\n```\n")
    status, told = asked(*command.split())
    assert status == 0
    assert told.strip() == printed.partition("\n```")[0].strip()


def test_an_unknown_architecture_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    import shutil

    other = tmp_path / "other"
    shutil.copytree(tiny_base, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    with pytest.raises(
        UserError, match="model_type is 'mamba', whose memory coresident cannot foretell"
    ) as caught:
        asked("--base", str(other))
    assert "llama, mistral, qwen2, qwen3" in caught.value.remedy
    (other / "config.json").write_text(json.dumps({**config, "hidden_size": "wide"}))
    with pytest.raises(UserError, match="lacks a size or has one that is none"):
        asked("--base", str(other))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--arm", "fork"), "give one of --base and --config"),
        ((*SMALL, "--base", "x"), "give one of --base and --config"),
        ((*SMALL, "--arm", "smolvm"), "--arm 'smolvm' is none whose memory can be foretold"),
        ((*SMALL, "--arm", "trl", "--loss", "sft"), "sharing: trl does not know loss: sft"),
        (
            (*SMALL, "--arm", "trl", "--set", "base.quantise=nf4"),
            "--arm trl over a 4-bit base is not foretold",
        ),
        ((*SMALL, "--device-memory", "80"), "--device-memory: '80' is no size"),
        ((*SMALL, "--row-tokens", "-4"), "--row-tokens -4: rows have 1 to max_length tokens"),
        ((*SMALL, "--row-tokens", "0"), "--row-tokens 0: rows have"),
        ((*SMALL, "--row-tokens", "9999999999999"), "--row-tokens 9999999999999: rows have"),
        ((*SMALL, "--set", "targets=[q_prj]"), "targets: no layer 'q_prj' is known"),
        ((*SMALL, "--set", "sharing=mapped"), "--set sharing would be passed over"),
        ((*SMALL, "--set", "learners=5"), "--set learners would be passed over"),
        ((*SMALL, "--set", "device_memory=2GiB"), "--set device_memory would be passed over"),
        ((*SMALL, "--row-tokens", "9", "--data", "a.jsonl"), "data say how long rows are"),
        ((*SMALL, "--arm", "trl", "--set", "schedule=solo"), "sharing: trl does not know schedule: solo"),
        (
            (*SMALL, "--arm", "packed", "--learners", "2", "--set", "own=[{rank: 4}, {rank: 8}]"),
            "own: learners that differ are not foretold",
        ),
        ((*SMALL, "--learners", "many"), "--learners 'many' is not a number of learners"),
        ((*SMALL, "--learners", "0"), "--learners '0' is not a number of learners"),
        (("--config", "qwen9"), "qwen9"),
        ((*SMALL, "--set", "rnak=4"), "rnak"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        asked(*arguments)


def test_neither_torch_nor_a_card_is_needed() -> None:
    code = (
        "import sys; from coresident.engines.pool.fit import foretell;"
        "from coresident.engines.pool.parameters import DPO;"
        "foretell.foretell(DPO.model_validate({'base': {'config': 'qwen2.5-0.5b'}, 'dtype': 'bfloat16'}), [4], 2**36, 256);"
        "assert not {'torch', 'transformers', 'pynvml'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_solo_learners_take_turns_on_the_memory_of_one() -> None:
    settings = DPO.model_validate(
        {"base": {"config": "qwen2.5-0.5b"}, "dtype": "bfloat16", "sharing": "none", "schedule": "solo"}
    )
    one, many = foretell.foretell(settings, [1, 8], 80 * GIB, 256).points
    assert one.total == many.total
