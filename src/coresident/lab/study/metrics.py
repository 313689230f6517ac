"""What the lab itself measures and checks for every cell, whatever the workload."""

from __future__ import annotations

from coresident.workload import Metric

BUILT_IN_METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("wall_seconds", "s", "less", "from the cell's start to its end"),
        Metric("cpu_seconds", "s", "less", "user and system time of all processes of the cell"),
        Metric(
            "peak_memory_mib",
            "MiB",
            "less",
            "sampled peak of the summed proportional set sizes of the cell's processes, from five samples on",
        ),
        Metric(
            "peak_device_memory_mib", "MiB", "less", "peak memory in use on the device, its idle use included"
        ),
        Metric(
            "energy_joules",
            "J",
            "less",
            "the device's energy counter over the cell, the host's energy missing",
        ),
    )
}

LAB_CONTROLS: frozenset[str] = frozenset({"exclusive-device", "pinned-cpus", "finite"})
