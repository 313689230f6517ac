"""The workload `pretrain.train`, as the lab finds it: nothing heavy is imported before a cell runs."""

from __future__ import annotations

from coresident.engines.pretrain.parameters import Train
from coresident.workload import Metric, Needs, Reporter, Workload

METRICS = (
    Metric(
        "tokens_per_second",
        "1/s",
        "more",
        "this session's targets over its training seconds: without startup, validation and checkpoints, with compilation",
    ),
    Metric(
        "steady_tokens_per_second",
        "1/s",
        "more",
        "median over this session's windows after its first update, which carries compilation",
    ),
    Metric(
        "elapsed_tokens_per_second",
        "1/s",
        "more",
        "this session's targets over the seconds since its first update, validation and checkpoints included",
    ),
    Metric(
        "update_ms", "ms", "less", "what an update takes, from the same windows as steady_tokens_per_second"
    ),
    Metric("mfu", "1", "more", "share of the card's peak; not reported on a card whose peak is not known"),
    Metric("first_update_seconds", "s", "less", "this session's first update, compilation included"),
    Metric("device_peak_mib", "MiB", "less", "tensors on the card at the highest (PyTorch's count)"),
    Metric("train_loss", "nat", "less", "mean cross-entropy of the last update"),
    Metric(
        "validation_loss",
        "nat",
        "less",
        "mean cross-entropy of the full validation split after the last update",
    ),
    Metric("unigram_loss", "nat", None, "that of a model which knows nothing but which tokens are common"),
    Metric("below_unigram", "nat", "more", "how far the validation loss is below it"),
    Metric("updates", "1", None, "updates in all"),
    Metric("targets", "1", None, "targets in all"),
    Metric("training_seconds", "s", "less", "over all sessions, without validation and checkpoints"),
    Metric("elapsed_seconds", "s", "less", "over all sessions, validation and checkpoints included"),
)


def _run(parameters: Train, cell: Reporter) -> None:
    from coresident.engines.pretrain.cell import run

    run(parameters, cell)


def _inspect(parameters: Train) -> Needs:
    from coresident.engines.pretrain.inspection import inspect

    return inspect(parameters)


train = Workload(
    name="pretrain.train",
    about="a small Llama or Mixture-of-Experts model trained from scratch",
    parameters=Train,
    metrics=METRICS,
    controls=frozenset({"attention-kernel", "deterministic", "compiled"}),
    run=_run,
    inspect=_inspect,
    resumable=True,
)
