"""What a decoding needs, and what is wrong with what it was asked, known before anything starts."""

from __future__ import annotations

from pathlib import Path

from coresident.engines.moe import budget
from coresident.engines.moe.models import architecture
from coresident.engines.moe.parameters import Decode
from coresident.errors import UserError
from coresident.workload import Needs


def inspect(asked: Decode) -> Needs:
    """Raises UserError for a model, budget or file that will not do."""
    path = None if asked.model.path is None else Path(asked.model.path).expanduser()
    found = (
        architecture.named(asked.model.config or "", asked.model.layers)
        if path is None
        else architecture.read(path)
    )
    if asked.slots is not None:
        capacities = budget.from_slots(found, asked.slots)
    elif asked.slots_by_layer is not None:
        capacities = budget.by_layer(found, asked.slots_by_layer)
    else:
        capacities = [found.experts] * len(found.mixtures)
    if asked.fills == "device":
        budget.require_a_step(capacities, found.experts, asked.prompts.batch * found.top_k)
    memory = None
    if asked.device_memory is not None:
        memory = budget.parse_size(asked.device_memory, "device_memory")
    kept = 0
    if asked.host_memory is not None:
        kept = budget.parse_size(asked.host_memory, "host_memory")
    for file in asked.inputs():
        if not file.exists():
            remedy = "correct the parameters"
            if asked.trace is not None and file == Path(asked.trace).expanduser():
                remedy = (
                    f"make it (coresident moe trace MODEL --out {file}), name another (--set parameters.trace=DIRECTORY),"
                    " or decode the model's own routing (--set parameters.routing=own --set parameters.trace=null)"
                )
            raise UserError(f"{file} does not exist", remedy)
    architecture.require_context(found, _prompt(asked) + asked.warmup + asked.tokens)
    # Two bytes a weight, or 4.5 bits: a lower bound whatever the files hold.
    each = found.expert_parameters * (0.5625 if asked.encoding == "q4" else 2)
    every = each * found.experts * len(found.mixtures)
    host = every if asked.tier == "pinned" else min(kept, every)
    card = int(sum(capacities) * each) if memory is None else memory
    files = (*sorted(path.glob("*.safetensors")), path / architecture.CONFIG) if path else ()
    return Needs(
        memory=int(host) + card,
        on_card=card,
        inputs=(*files, *_files(asked)),
    )


def _prompt(asked: Decode) -> int:
    """Tokens of the longest prompt, as far as is known without a tokenizer: a text has one at least."""
    wanted = asked.prompts
    if asked.trace is None:
        # Of a family's texts only those are followed that are long enough.
        known = not wanted.text and (wanted.source == "drawn" or wanted.follow)
        return wanted.length if known else 1
    from coresident.engines.moe.traces.files import read_manifest

    lengths = [
        one.prefill
        for one in read_manifest(Path(asked.trace).expanduser()).prompts
        if one.split == "held-out" and one.tokens - one.prefill >= asked.warmup + asked.tokens
    ]
    # None where the trace has too few such prompts, which the cell refuses.
    return max(lengths[wanted.seed : wanted.seed + wanted.batch], default=1)


def _files(asked: Decode) -> list[Path]:
    """The inputs' files: a set of traces is a directory."""
    return [
        file
        for named in asked.inputs()
        for file in (sorted(named.iterdir()) if named.is_dir() else (named,))
        if file.is_file()
    ]
