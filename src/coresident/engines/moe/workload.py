"""The workload `moe.decode`, as the lab finds it: nothing heavy is imported before a cell runs."""

from __future__ import annotations

from coresident.engines.moe.parameters import Decode
from coresident.workload import Metric, Needs, Reporter, Workload

METRICS = (
    Metric("tokens_per_second", "1/s", "more", "tokens of all rows over the timed steps, each until its token is on the host"),
    Metric("step_ms", "ms", "less", "median of the timed steps"),
    Metric("prefill_seconds", "s", "less", "reading all prompts, until the first token is on the host"),
    Metric("hit_rate", "1", "more", "of the distinct experts that timed steps asked for, those resident before the step"),
    Metric("misses_per_token", "1", "less", "records installed in timed steps, over tokens"),
    Metric("bytes_per_token", "B", "less", "the same in bytes of records, padding aside"),
    Metric("distinct_1", "1", None, "distinct tokens over tokens, of those taken in: near 0 where a text repeats itself"),
    Metric("slots", "1", None, "slots a layer, on average"),
    Metric("slots_mib", "MiB", "less", "device memory of the slots"),
    Metric("budget_mib", "MiB", "less", "device memory of dense weights, keys and values, and slots"),
    Metric("logit_difference", "1", "less", "largest absolute difference of a logit to the reference's, along the same tokens"),
    Metric("tokens_differ", "1", "less", "likeliest tokens that are not the reference's, along the same tokens"),
    Metric("fetch_mib_per_second", "MiB/s", "more", "bytes read over the time from a fetch's first read to its last"),
    Metric("raw_read_mib_per_second", "MiB/s", None, "what the disk gives of records past the page cache, between timed steps"),
    Metric("fetch_of_raw", "1", "more", "the one over the other"),
    Metric("resident_ms", "ms", "less", "mean step of the same model with every expert resident"),
    Metric("sync_us", "us", "less", "reading one router decision back to the host, at the machine's best"),
    Metric("record_copy_us", "us", "less", "one record to the device among others, by copies or kernels, whichever is faster"),
    Metric("bound_tokens_per_second", "1/s", None, "batch / (resident step + layers x sync + misses x record copy)"),
    Metric("of_bound", "1", "more", "tokens_per_second over the bound"),
    Metric("host_wait_us", "us", "less", "host time a token spent waiting for the device's router decisions"),
    Metric("host_policy_us", "us", "less", "host time a token spent deciding what to evict"),
    Metric("host_read_us", "us", "less", "host time a token spent waiting for records from the tier below"),
    Metric("host_install_us", "us", "less", "host time a token spent issuing copies into slots"),
    Metric("host_launch_us", "us", "less", "host time a token spent launching kernels (fused only)"),
    Metric("host_other_us", "us", "less", "the rest of a token's time"),
)  # fmt: skip


def _run(parameters: Decode, cell: Reporter) -> None:
    from coresident.engines.moe.cell import run

    run(parameters, cell)


def _inspect(parameters: Decode) -> Needs:
    from coresident.engines.moe.inspection import inspect

    return inspect(parameters)


decode = Workload(
    name="moe.decode",
    about="a Mixture-of-Experts model decoded with a bounded number of resident experts a layer",
    parameters=Decode,
    metrics=METRICS,
    controls=frozenset({"tier", "kernels"}),
    run=_run,
    inspect=_inspect,
)
