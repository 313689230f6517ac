"""A recipe with nothing left open, and the identity by which a training may or may not go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from coresident.engines.pretrain import parameters, recipe
from coresident.engines.pretrain.parameters import Optimiser, Train
from coresident.errors import UserError
from coresident.model.presets import PRESETS
from coresident.model.shape import parameters_of


def resolved(**asked: Any) -> recipe.Recipe:
    return recipe.resolve(Train.model_validate(asked), "cache", "float32")


@pytest.mark.parametrize(
    ("preset", "rate", "beta2", "batch", "microbatch"),
    [
        ("20m", 0.0056, 0.98, 131_072, 128),
        ("50m", 0.001, 0.99, 32_768, 32),
        ("90m", 0.001, 0.99, 32_768, 32),
        ("250m", 0.001, 0.99, 8_192, 8),
        ("500m", 0.001, 0.99, 8_192, 8),
    ],
)
def test_a_preset_brings_its_published_recipe(
    preset: str, rate: float, beta2: float, batch: int, microbatch: int
) -> None:
    found = resolved(preset=preset)
    assert (found.settings.optimiser.learning_rate, found.settings.optimiser.beta2) == (rate, beta2)
    assert (found.settings.batch_tokens, found.microbatch) == (batch, microbatch)
    assert found.course.batch == found.blocks_per_update == batch // 1024


def test_the_budget_is_twenty_targets_a_parameter_to_a_block() -> None:
    assert resolved(preset="20m").course.blocks == -(-20 * 20_403_520 // 1024)
    assert resolved(preset="20m", budget={"targets": 1_000_000}).course.blocks == -(-1_000_000 // 1024)
    assert resolved(preset="20m", budget={"updates": 200}).course.blocks == 200 * 128


def test_a_shape_of_ones_own_has_somewhere_to_start() -> None:
    shape = {"vocabulary": 300, "layers": 1, "width": 16, "heads": 2, "feedforward": 24, "context": 50}
    found = resolved(shape=shape)
    assert (found.blocks_per_update, found.microbatch) == (32, 32)
    assert found.course.blocks == -(-20 * parameters_of(found.shape) // 50)


def test_every_preset_has_a_recipe() -> None:
    assert recipe.DEFAULTS.keys() == PRESETS.keys()


def test_what_is_given_wins_over_the_preset() -> None:
    found = resolved(preset="20m", optimiser={"learning_rate": 0.5, "beta2": 0.0}, batch_tokens=4096)
    assert (found.settings.optimiser.learning_rate, found.settings.optimiser.beta2) == (0.5, 0.0)
    assert (found.blocks_per_update, found.microbatch) == (4, 4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("runtime__compile", True), ("runtime__compile_mode", "max-autotune"), ("runtime__sdpa_backend", "reference"),
        ("runtime__deterministic", True), ("runtime__prefetch", False), ("runtime__threads", 2), ("runtime__log_every", 7),
        ("microbatch", 4), ("checkpoints__policy", "all"), ("checkpoints__every", 3), ("validation__subset", 0),
        ("validation__full", False), ("validation__batch", 1),
    ],
)  # fmt: skip
def test_how_a_training_is_executed_does_not_change_what_it_is(
    settings: Callable[..., Train], key: str, value: Any
) -> None:
    one, other = (
        recipe.resolve(asked, "c", "float32").identity() for asked in (settings(), settings(**{key: value}))
    )
    assert one == other


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shape__width", 32), ("shape__rope_theta", 5e4), ("optimiser__learning_rate", 0.5), ("optimiser__beta1", 0.8),
        ("optimiser__clip", 2.0), ("schedule__warmup", 0.1), ("budget__updates", 41), ("budget__virtual_epochs", 2),
        ("batch_tokens", 128), ("seed", 1),
    ],
)  # fmt: skip
def test_what_the_numbers_follow_from_does_and_is_named(
    settings: Callable[..., Train], key: str, value: Any
) -> None:
    one, other = (
        recipe.resolve(asked, "c", "float32").identity() for asked in (settings(), settings(**{key: value}))
    )
    assert one != other
    said = recipe.differences(one, other)
    assert any(key.split("__")[-1] in line or "blocks" in line for line in said)


def test_the_microbatch_of_balanced_experts_belongs_to_it_unless_it_is_the_usual_one(
    settings: Callable[..., Train], mixture: dict[str, Any]
) -> None:
    """Balance is computed within a microbatch: of others it is another loss."""

    def identity(microbatch: int | None, **more: Any) -> dict[str, str]:
        asked = settings(shape={**mixture, "mixture": {**mixture["mixture"], **more}}, microbatch=microbatch)
        return recipe.resolve(asked, "c", "float32").identity()

    assert identity(2)["microbatch"] == "2"
    assert "microbatch" not in identity(None)
    assert identity(None) == identity(4) != identity(2)
    assert identity(1, balance=0.0) == identity(2, balance=0.0)


def test_data_and_precision_belong_to_it(settings: Callable[..., Train]) -> None:
    base = recipe.resolve(settings(), "c", "float32").identity()
    assert recipe.resolve(settings(), "d", "float32").identity() != base
    assert recipe.resolve(settings(), "c", "bfloat16").identity() != base


def test_a_setting_that_is_added_later_leaves_identities_as_they_were(
    settings: Callable[..., Train], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer program's optimiser has one more setting; at its default, checkpoints of the older program still belong."""
    before = recipe.resolve(settings(), "c", "float32").identity()

    class Newer(Optimiser):
        nesterov: bool = False

    monkeypatch.setattr(recipe, "Optimiser", Newer)
    assert recipe.resolve(settings(), "c", "float32").identity() == before
    assert (
        "optimiser.nesterov"
        in recipe.resolve(
            settings().model_copy(update={"optimiser": Newer(nesterov=True)}), "c", "float32"
        ).identity()
    )


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"preset": "20m", "batch_tokens": 1500}, "batch_tokens 1500 is no whole number of sequences of 1024"),
        ({"preset": "20m", "microbatch": 48}, "microbatch 48 does not divide the 128 sequences"),
        ({"preset": "20n"}, "no model preset '20n'; did you mean '20m'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_a_sentence(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        resolved(**asked)
    assert said in str(refused.value)


def test_a_remedy_can_be_followed() -> None:
    with pytest.raises(UserError, match="set microbatch to 43") as refused:
        resolved(preset="20m", microbatch=48, batch_tokens=129 * 1024)
    assert refused.value.remedy
    assert resolved(preset="20m", microbatch=43, batch_tokens=129 * 1024).microbatch == 43


def test_one_budget_only() -> None:
    with pytest.raises(ValueError, match="one of targets and updates"):
        parameters.Budget(targets=1, updates=1)
