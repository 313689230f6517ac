"""What a training takes is told before it starts: never more than it really takes, and with what would fit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from coresident.engines.pretrain import memory, recipe
from coresident.engines.pretrain.memory import Load
from coresident.engines.pretrain.parameters import Train
from coresident.errors import MachineError
from coresident.model.presets import PRESETS
from coresident.model.shape import ModelShape
from coresident.text.cache import TokenCache

GIB = 1 << 30
SHAPE = ModelShape(vocabulary=6000, layers=3, width=128, heads=4, feedforward=352, context=128)
# Highest memory less that before, in bytes, of a microbatch of 32 sequences (`learned`) or of a batch (`evaluated`).
PEAK = """
import sys, torch
from coresident.model.initial import initialise
from coresident.model.llama import Llama
from coresident.model.shape import ModelShape
torch.set_num_threads(1)
model = Llama(ModelShape.model_validate_json(sys.argv[1]), "auto", 0)
initialise(model, 0)
tokens = torch.randint(0, 6000, (32, 128))
model.loss(tokens[:1], tokens[:1]).cross_entropy.backward()
def told(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))
before = told("VmRSS")
with torch.set_grad_enabled(sys.argv[2] == "learned"):
    loss = model.loss(tokens, tokens).cross_entropy
if sys.argv[2] == "learned":
    loss.backward()
print(told("VmHWM") - before)
"""


@pytest.mark.parametrize("what", ["learned", "evaluated"])
def test_it_is_a_lower_bound_and_near_what_is_really_taken(what: str) -> None:
    argv = [sys.executable, "-c", PEAK, SHAPE.model_dump_json(), what]
    peak = int(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
    load = Load(SHAPE, 32, 32, 0)
    told = load.update() if what == "learned" else load.evaluation()
    assert 0.97 * told < peak < 1.5 * told


def test_a_training_that_does_not_fit_is_told_what_to_set() -> None:
    asked = Load(PRESETS["20m"], 128, 128, 0)
    memory.check_training(asked, 128, 100 * GIB)
    with pytest.raises(
        MachineError, match=r"at least 7\d\.\d GiB .*microbatch 128.* 24\.0 GiB are free"
    ) as refused:
        memory.check_training(asked, 128, 24 * GIB)
    assert "set microbatch to 16 and validation.batch to 46 or" in refused.value.remedy
    assert "set runtime.loss_chunk to 1024 and microbatch to 32" in refused.value.remedy
    # Both remedies work.
    memory.check_training(Load(PRESETS["20m"], 16, 46, 0), 128, 24 * GIB)
    memory.check_training(Load(PRESETS["20m"], 32, 128, 1024), 128, 24 * GIB)
    with pytest.raises(MachineError) as refused:
        memory.check_training(asked, 128, GIB // 2)
    assert "take a smaller model" in refused.value.remedy


def test_only_a_divisor_of_the_updates_sequences_is_proposed() -> None:
    with pytest.raises(MachineError) as refused:
        memory.check_training(Load(PRESETS["20m"], 45, 0, 0), 45, 24 * GIB)
    assert "set microbatch to 15 or" in refused.value.remedy


def test_an_evaluation_that_does_not_fit_is_told_its_batch() -> None:
    memory.check_evaluation(PRESETS["20m"], 128, 0, 40 * GIB)
    with pytest.raises(MachineError, match="an evaluation of 128 sequences") as refused:
        memory.check_evaluation(PRESETS["20m"], 128, 0, 24 * GIB)
    assert refused.value.remedy == "give --batch 47"


def test_a_batch_is_no_larger_than_the_validation_split(
    cache: TokenCache, settings: Callable[..., Train]
) -> None:
    def batch(**changed: Any) -> int:
        asked = recipe.resolve(settings(validation__batch=1 << 20, **changed), "", "float32")
        return memory.load(asked, memory.held_out(cache, asked)).batch

    largest = max(len(cache.tokens("validation", family)) for family in cache.families)
    assert batch() == largest // 16
    assert 0 < batch(validation__full=False) < largest // 16
    assert batch(validation__full=False, validation__subset=0) == 0
