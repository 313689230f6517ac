"""The workload `pool.dpo`, as the lab finds it: nothing heavy is imported before a cell runs."""

from __future__ import annotations

from coresident.engines.pool.parameters import DPO
from coresident.workload import Metric, Needs, Reporter, Workload

METRICS = (
    Metric(
        "tokens_per_second",
        "1/s",
        "more",
        "real tokens of all learners over last end - first start, after the barrier",
    ),
    Metric(
        "pairs_per_second",
        "1/s",
        "more",
        "pairs of all learners over last end - first start (smolvm's window holds its first step too): what arms have"
        " in common whose tokens are not known",
    ),
    Metric(
        "padded_tokens_per_second",
        "1/s",
        None,
        "pairs_per_second x max_length: what smolvm's harness calls tokens, mostly padding",
    ),
    Metric(
        "tokens_per_second_per_learner",
        "1/s",
        "more",
        "median over learners of a learner's own real tokens a second",
    ),
    Metric("step_ms", "ms", "less", "median over learners of a learner's median step after the barrier"),
    Metric("learners_done", "1", "more", "learners that trained every step and exported a finite adapter"),
    Metric(
        "first_step_seconds",
        "s",
        "less",
        "from the run's start until the last learner is past its first step",
    ),
    Metric(
        "learner_start_seconds",
        "s",
        "less",
        "from the order to start the learners (the base being ready, if shared) until the last is past its first step",
    ),
    Metric(
        "base_ready_seconds",
        "s",
        "less",
        "how long the golden process, or else the first learner, took to hold the base",
    ),
    Metric(
        "fork_seconds", "s", "less", "from the order to fork until the last learner was alive (fork only)"
    ),
    Metric(
        "golden_to_first_step_seconds",
        "s",
        "less",
        "from the golden process being ready (base loaded and checksummed) until the last learner is past its first step",
    ),
    Metric(
        "device_memory_mib",
        "MiB",
        "less",
        "the whole card's memory at its highest, less what was in use before",
    ),
    Metric(
        "marginal_device_memory_mib",
        "MiB",
        "less",
        "what one learner adds to the whole card: with all at the barrier less with them gone, over their number",
    ),
    Metric(
        "raw_read_mib_per_second",
        "MiB/s",
        None,
        "what the disk gives of the base's largest file past the page cache, read after the run (page_cache: cold)",
    ),
    Metric(
        "learner_memory_mib",
        "MiB",
        "less",
        "sum of the PSS of the learners that were there together, at the barrier",
    ),
    Metric("pool_memory_mib", "MiB", "less", "the same with the golden process and the zygote"),
    Metric("base_mib", "MiB", None, "what the base occupies once"),
    Metric(
        "first_loss",
        "nat",
        None,
        "mean over learners of the loss at the first step (ln 2 for a fresh adapter)",
    ),
    Metric("last_loss", "nat", "less", "mean over learners of the loss at the last step"),
)


def _run(parameters: DPO, cell: Reporter) -> None:
    from coresident.engines.pool.run import run

    run(parameters, cell)


def _inspect(parameters: DPO) -> Needs:
    from coresident.engines.pool.inspection import inspect

    return inspect(parameters)


dpo = Workload(
    name="pool.dpo",
    about="N LoRA learners trained by direct preference optimisation over one frozen base",
    parameters=DPO,
    metrics=METRICS,
    controls=frozenset({"sharing-engaged", "base-unchanged", "mps", "page-cache"}),
    run=_run,
    inspect=_inspect,
)
