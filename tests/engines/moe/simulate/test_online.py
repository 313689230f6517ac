"""The simulator and a decoder that really evicts count the same hits on the same tokens."""

from pathlib import Path

import pytest
import torch

from coresident.engines.moe import assemble
from coresident.engines.moe.parameters import Decode, Model
from coresident.engines.moe.predictors import counting
from coresident.engines.moe.simulate.play import play
from coresident.engines.moe.traces import collect
from coresident.engines.moe.traces.prompts import Prompt
from coresident.engines.moe.traces.traces import Traces

_STEPS = 24


@pytest.fixture(scope="module")
def traced(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Traces:
    prompts = [
        Prompt("one", "prose", "Names refer to objects.", "held-out"),
        Prompt("two", "code", "if x:", "fit"),
    ]
    settings = collect.Tracing(max_tokens=_STEPS, prompt_tokens=12, temperature=1.0)
    return collect.trace(
        tiny_model, prompts, settings, tmp_path_factory.mktemp("traces") / "set", "cpu", lambda _: None
    )


@pytest.mark.parametrize("slots", range(2, 9))
@pytest.mark.parametrize("policy", ["lru", "lfu", "lfu-decay", "static"])
def test_the_decoders_counter_and_the_simulator_agree(
    traced: Traces, tiny_model: Path, tmp_path: Path, policy: str, slots: int
) -> None:
    popularity = counting.frequency(traced.of("fit"))
    file = tmp_path / "popularity.json"
    file.write_text(str(popularity.tolist()))
    asked = Decode.model_validate(
        {
            "model": Model(path=str(tiny_model)),
            "slots": slots,
            "policy": policy,
            "popularity": str(file) if policy == "static" else None,
        }
    )
    simulated = play(traced, (slots,) * 4, policy, "kept", popularity=popularity)
    engine = assemble.build(asked, assemble.open_model(asked.model), torch.device("cpu"), 64, 1)
    try:
        for one, expected in zip(traced.prompts, simulated.prompts, strict=True):
            before = [count.hits for count in engine.cache.decoded]
            engine.decoder.prefill([one.tokens[: one.prefill].tolist()])
            for token in one.tokens[one.prefill :].tolist():
                engine.decoder.step(torch.tensor([token]))
            hits = [count.hits - b for count, b in zip(engine.cache.decoded, before, strict=True)]
            assert hits == expected.hits.sum(axis=0).tolist()
    finally:
        engine.close()
