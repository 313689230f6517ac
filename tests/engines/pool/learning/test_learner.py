"""A learner: the same numbers wherever its base lies and however its process came to be, and no number that
is none.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from coresident.engines.pool.learning.adapter import adapter_tensors, digest
from coresident.engines.pool.learning.dpo import preference
from coresident.engines.pool.learning.learner import SERIES, Learner, NonFinite, warmup
from coresident.engines.pool.learning.scoring import Scorer, log_probabilities
from coresident.engines.pool.parameters import DPO
from coresident.errors import InternalError

# One learner's whole life, in float32 and then in bfloat16; `where` is how it holds the base.
LIFE = """
import json, mmap, os, sys
from pathlib import Path

base, where = Path(sys.argv[1]), sys.argv[2]
from coresident.engines.pool.learning.model import attach, build_on_meta
from coresident.engines.pool.parameters import DPO

def tensors(settings):
    import torch
    from safetensors.torch import load_file

    dtype = getattr(torch, settings.dtype)
    loaded = {name: value.to(dtype) for name, value in load_file(base / "model.safetensors").items()}
    if where == "heap":
        return loaded
    # One shared mapping in which nothing is aligned beyond eight bytes; the learner can only read it.
    places, size = {}, 8
    for name, value in loaded.items():
        places[name] = size
        size += (value.numel() * value.element_size() + 15) // 8 * 8
    arena = os.memfd_create("arena")
    os.ftruncate(arena, size)
    for name, value in loaded.items():
        os.pwrite(arena, value.contiguous().view(torch.uint8).numpy().tobytes(), places[name])
    view = mmap.mmap(arena, size, mmap.MAP_SHARED, mmap.PROT_READ)
    return {
        name: torch.frombuffer(view, dtype=dtype, count=value.numel(), offset=places[name]).view(value.shape)
        for name, value in loaded.items()
    }


def live(model, settings):
    import torch

    torch.set_num_threads(1)
    from coresident.engines.pool.learning.adapter import adapter_tensors, digest
    from coresident.engines.pool.learning.learner import Learner
    from coresident.engines.pool.learning.tokenized import batches, tokenize
    from coresident.text import pythondocs, tokenizer

    attach(model, tensors(settings), settings)
    data = tokenize(pythondocs.pairs(12, 100, 64), tokenizer.load(base), settings)
    learner = Learner(model, batches(data, settings, 0), settings)
    for _ in range(settings.steps):
        learner.step()
    series = {name: [float(value).hex() for value in values] for name, values in learner.series.items()}
    print(json.dumps([series, digest(adapter_tensors(model))]), flush=True)


short = DPO(steps=4, batch=2, max_length=64, learning_rate=1e-3)
runs = [short.model_copy(update={"dtype": name}) for name in ("float32", "bfloat16")]
skeletons = [(build_on_meta(base, settings), settings) for settings in runs]
for _ in range(1 if where == "heap" else 2):
    for model, settings in skeletons:
        if where == "heap":
            live(model, settings)
            continue
        child = os.fork()
        if child == 0:
            live(model, settings)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_child_over_read_only_memory_learns_what_a_fresh_process_does(tiny_base: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", LIFE, str(tiny_base), where],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for where in ("heap", "read-only")
    ]
    outputs = []
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        outputs.append([json.loads(line) for line in out.splitlines()])
    fresh, forked = outputs
    assert len(fresh) == 2
    assert fresh[0] != fresh[1]
    assert forked == [*fresh, *fresh]


def test_each_step_says_what_it_saw(build: Any, settings: DPO, docs_batches: Any) -> None:
    batches = docs_batches(settings)
    learner = Learner(build(settings), batches, settings)
    results = [learner.step() for _ in range(settings.steps)]
    assert [result.step for result in results] == [1, 2, 3, 4, 5]
    assert [result.tokens for result in results] == [int(batch.attention_mask.sum()) for batch in batches]
    assert results[0].loss == pytest.approx(math.log(2), abs=1e-7)
    assert results[0].margin == results[0].accuracy == 0.0
    assert all(result.gradient_norm > 0 and result.seconds > 0 for result in results)
    assert all(
        result.margin == pytest.approx(result.chosen_reward - result.rejected_reward, abs=1e-6)
        for result in results
    )
    assert learner.series == {name: [getattr(result, name) for result in results] for name in SERIES}


def test_it_learns_to_prefer(build: Any, settings: DPO, docs_batches: Any) -> None:
    settings = settings.model_copy(update={"steps": 20, "learning_rate": 1e-2})
    learner = Learner(build(settings), docs_batches(settings), settings)
    results = [learner.step() for _ in range(20)]
    assert results[-1].loss < 0.5 * results[0].loss
    assert results[-1].accuracy == 1.0


def test_training_moves_the_adapter_and_nothing_else(
    build: Any, settings: DPO, tensors: Any, docs_batches: Any
) -> None:
    given, untouched = tensors(), tensors()
    model = build(settings, given)
    before = digest(adapter_tensors(model))
    learner = Learner(model, docs_batches(settings), settings)
    for _ in range(settings.steps):
        learner.step()
    assert all(torch.equal(given[name], untouched[name]) for name in given)
    assert digest(adapter_tensors(model)) != before


def test_two_learners_on_one_base_do_not_touch_one_another(
    build: Any, settings: DPO, tensors: Any, docs_batches: Any
) -> None:
    shared = tensors()

    def alone(number: int) -> str:
        model = build(settings)
        learner = Learner(model, docs_batches(settings, number), settings)
        for _ in range(settings.steps):
            learner.step()
        return digest(adapter_tensors(model))

    models = [build(settings, shared) for _ in range(2)]
    learners = [
        Learner(model, docs_batches(settings, number), settings) for number, model in enumerate(models)
    ]
    for _ in range(settings.steps):
        for learner in learners:
            learner.step()
    together = [digest(adapter_tensors(model)) for model in models]
    assert together == [alone(0), alone(1)]
    assert together[0] != together[1]


def test_the_step_is_adamw_after_warmup_and_clipping(build: Any, settings: DPO, docs_batches: Any) -> None:
    """The same five steps by hand, from PyTorch's own parts."""
    settings = settings.model_copy(
        update={
            "dtype": "float64",
            "clip": 0.3,
            "warmup_steps": 3,
            "weight_decay": 0.1,
            "learning_rate": 5e-3,
        }
    )
    batches = docs_batches(settings)
    ours, theirs = build(settings), build(settings)
    learner = Learner(ours, batches, settings)
    norms = [learner.step().gradient_norm for _ in batches]
    parameters = [value for value in theirs.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.1)
    for share, batch, norm in zip((1 / 3, 2 / 3, 1, 1, 1), batches, norms, strict=True):
        optimizer.param_groups[0]["lr"] = 5e-3 * share
        optimizer.zero_grad()
        preference(Scorer.of(theirs), batch, settings.beta).loss.backward()
        assert torch.nn.utils.clip_grad_norm_(parameters, 0.3).item() == pytest.approx(norm, rel=1e-9)
        optimizer.step()
    assert max(norms) > 0.3, "a run in which clipping does something"
    for name, value in adapter_tensors(theirs).items():
        torch.testing.assert_close(adapter_tensors(ours)[name], value, rtol=1e-7, atol=1e-12)


def test_the_learning_rate_rises_linearly_then_stays() -> None:
    assert [warmup(step, 4) for step in range(1, 7)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert warmup(1, 0) == 1.0


def test_a_loss_that_is_not_finite_ends_the_training_and_names_the_step(
    build: Any, settings: DPO, docs_batches: Any
) -> None:
    model = build(settings)
    learner = Learner(model, docs_batches(settings), settings)
    learner.step()
    with torch.no_grad():
        next(value for name, value in model.named_parameters() if ".lora_B." in name).fill_(math.nan)
    with pytest.raises(NonFinite, match="loss is nan at step 2"):
        learner.step()
    assert len(learner.series["loss"]) == 1


def test_a_gradient_that_is_not_finite_is_not_applied(build: Any, settings: DPO, docs_batches: Any) -> None:
    model = build(settings)
    learner = Learner(model, docs_batches(settings), settings)
    weight = next(value for name, value in model.named_parameters() if ".lora_B." in name)
    weight.register_hook(lambda gradient: gradient.fill_(math.inf))
    before = digest(adapter_tensors(model))
    with pytest.raises(NonFinite, match=r"gradient norm is (inf|nan) at step 1"):
        learner.step()
    assert digest(adapter_tensors(model)) == before


def test_a_learner_without_a_batch_or_an_adapter_is_our_bug(
    build: Any, settings: DPO, docs_batches: Any
) -> None:
    learner = Learner(build(settings), docs_batches(settings)[:1], settings)
    learner.step()
    with pytest.raises(InternalError, match="step 2"):
        learner.step()
    with pytest.raises(InternalError, match="nothing to train"):
        Learner(build(settings).requires_grad_(False), [], settings)


def test_a_policy_that_does_not_start_at_its_reference_is_our_bug(
    build: Any, settings: DPO, disturb: Any
) -> None:
    model = build(settings)
    disturb(model)
    with pytest.raises(InternalError, match="not zero"):
        Learner(model, [], settings)


def run(model: Any, batches: Any, settings: DPO) -> tuple[dict[str, list[float]], str]:
    learner = Learner(model, batches, settings)
    for _ in range(settings.steps):
        learner.step()
    return learner.series, digest(adapter_tensors(model))


@pytest.mark.parametrize(
    "change", [{"checkpointing": True}, {"reference": "precomputed"}, {"held_to": "base"}], ids=str
)
def test_what_saves_memory_or_time_changes_no_bit(
    build: Any, settings: DPO, docs_batches: Any, change: dict[str, Any]
) -> None:
    batches = docs_batches(settings)
    plain = run(build(settings), batches, settings)
    changed = settings.model_copy(update=change)
    assert run(build(changed), batches, changed) == plain


def test_checkpointing_keeps_no_activations_of_a_layer(build: Any, settings: DPO, docs_batches: Any) -> None:
    def kept(settings: DPO) -> int:
        learner = Learner(build(settings), docs_batches(settings), settings)
        sizes = []

        def pack(value: torch.Tensor) -> torch.Tensor:
            sizes.append(value.nbytes)
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            log_probabilities(learner.scorer, docs_batches(settings)[0])
        return sum(sizes)

    assert kept(settings.model_copy(update={"checkpointing": True})) < 0.4 * kept(settings)


def test_a_precomputed_reference_is_the_base_even_once_the_policy_has_moved(
    build: Any, settings: DPO, docs_batches: Any
) -> None:
    """Counted: the reference's passes are all before the first step."""
    settings = settings.model_copy(update={"reference": "precomputed"})
    model = build(settings)
    passes = []
    model.get_base_model().model.layers[0].register_forward_pre_hook(
        lambda *_: passes.append(torch.is_grad_enabled())
    )
    learner = Learner(model, docs_batches(settings), settings)
    assert passes == [False] * settings.steps
    learner.step()
    assert passes == [False] * settings.steps + [True]


def test_a_policy_may_be_held_to_the_adapter_it_starts_from(
    build: Any, settings: DPO, docs_batches: Any, disturb: Any
) -> None:
    model = build(settings)
    disturb(model)
    batches = docs_batches(settings)
    to_start = Learner(model, batches, settings.model_copy(update={"held_to": "start"})).step()
    assert (to_start.loss, to_start.margin) == (pytest.approx(math.log(2), abs=1e-7), 0.0)
    model = build(settings)
    disturb(model)
    to_base = Learner(model, batches, settings.model_copy(update={"held_to": "base"})).step()
    assert abs(to_base.loss - math.log(2)) > 1e-3


def test_supervised_fine_tuning_learns_its_completions(build: Any, settings: DPO, docs_batches: Any) -> None:
    settings = settings.model_copy(update={"loss": "sft", "steps": 20, "learning_rate": 1e-2})
    learner = Learner(build(settings), docs_batches(settings), settings)
    results = [learner.step() for _ in range(20)]
    assert results[-1].loss < 0.95 * results[0].loss
    assert set(learner.series) == {"loss", "gradient_norm", "tokens"}
    assert results[0].margin is None
