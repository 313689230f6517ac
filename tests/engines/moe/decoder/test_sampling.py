"""The next token: the likeliest, or drawn as asked and again the same for the same seed."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from coresident.engines.moe.decoder.sampling import Sampler, Sampling

SCORES = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1]]))


def share(sampling: Sampling, draws: int = 4000) -> list[float]:
    """How often each token is drawn."""
    sampler = Sampler(sampling)
    drawn = sampler(SCORES.expand(draws, -1), [0] * draws)
    return (torch.bincount(drawn, minlength=4) / draws).tolist()


def test_without_temperature_it_is_the_likeliest() -> None:
    assert Sampler(Sampling())(torch.tensor([[1.0, 3.0, 2.0], [5.0, 1.0, 1.0]])).tolist() == [1, 0]


def test_tokens_come_as_often_as_their_probability_says() -> None:
    assert share(Sampling(temperature=1.0)) == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=0.03)


def test_temperature_flattens() -> None:
    cooled, hot = share(Sampling(temperature=0.5)), share(Sampling(temperature=5.0))
    assert cooled[0] == pytest.approx(0.5**2 / (0.5**2 + 0.25**2 + 0.15**2 + 0.1**2), abs=0.03)
    assert hot[0] < 0.35


def test_top_k_and_top_p_cut_the_tail() -> None:
    assert share(Sampling(temperature=1.0, top_k=2)) == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=0.03)
    # 0.5 alone does not reach 0.6; 0.5 and 0.25 do.
    assert share(Sampling(temperature=1.0, top_p=0.6)) == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=0.03)
    assert share(Sampling(temperature=1.0, top_p=0.01)) == [1, 0, 0, 0]


def test_a_seed_repeats() -> None:
    rows = SCORES.expand(50, -1)
    draws = [Sampler(Sampling(temperature=1.0, seed=seed))(rows, [0] * 50).tolist() for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_a_text_of_a_batch_draws_as_its_own_seed_alone() -> None:
    batch = Sampler(Sampling(temperature=1.0, seed=4), 3)
    rows = SCORES.expand(30, -1)
    together = [batch(rows[:3], [0, 1, 2]).tolist() for _ in range(10)]
    alone = [batch(rows[:1], [2]).item() for _ in range(10)]
    wanted = Sampler(Sampling(temperature=1.0, seed=6))(rows[:20], [0] * 20).tolist()
    assert [row[2] for row in together] + alone == wanted
    assert [row[0] for row in together] != [row[1] for row in together]


def test_almost_no_temperature_is_the_likeliest() -> None:
    assert Sampler(Sampling(temperature=1e-40))(torch.tensor([[1.0, 3.0, -2.0]])).tolist() == [1]


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}])
def test_what_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Sampling.model_validate(wrong)
