"""Drawn weights written as a Hugging Face directory, for what needs a model's own files: scattered reads, transformers."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from coresident.engines.moe.layout.record import DTYPES
from coresident.engines.moe.models.architecture import CONFIG, Architecture
from coresident.engines.moe.models.checkpoint import dense_shapes
from coresident.engines.moe.models.origins import Drawn
from coresident.engines.moe.models.stored import INDEX
from coresident.errors import MachineError


def materialise(origin: Drawn, out: Path) -> None:
    """Write `out`, one shard a layer and one for the rest; it appears whole or not at all."""
    found = origin.architecture
    aside = out.with_name(f".{out.name}.aside-{os.getpid()}")
    placed: dict[str, str] = {}
    kind = DTYPES[origin.encoding]
    try:
        aside.mkdir(parents=True)
        for shard in (None, *range(found.layers)):
            name = "rest.safetensors" if shard is None else f"layer-{shard:03}.safetensors"
            # Copies: what is saved may not share memory, as windows of a table do.
            tensors = {key: value.to(kind, copy=True) for key, value in _shard(origin, shard).items()}
            save_file(tensors, aside / name, metadata={"format": "pt"})
            placed |= dict.fromkeys(tensors, name)
        (aside / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}), encoding="utf-8")
        (aside / CONFIG).write_text(json.dumps(config_of(found), indent=1) + "\n", encoding="utf-8")
        aside.rename(out)
    except OSError as error:
        raise MachineError(
            f"{out} cannot be written ({error.strerror})",
            "free space there, or set CORESIDENT_CACHE elsewhere",
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def config_of(found: Architecture) -> dict[str, Any]:
    """`config.json`, as transformers writes it."""
    qwen = found.kind == "qwen3_moe"
    told = asdict(found)
    return {
        "architectures": ["Qwen3MoeForCausalLM" if qwen else "OlmoeForCausalLM"],
        "model_type": found.kind,
        "vocab_size": found.vocabulary,
        "hidden_size": found.width,
        "num_hidden_layers": found.layers,
        "num_attention_heads": found.heads,
        "num_key_value_heads": found.kv_heads,
        "head_dim": found.head_width,
        "num_experts": found.experts,
        "num_experts_per_tok": found.top_k,
        "norm_topk_prob": found.normalise,
        "intermediate_size": found.dense_width if qwen else found.expert_width,
        **({"moe_intermediate_size": found.expert_width} if qwen else {"clip_qkv": found.clip}),
        "mlp_only_layers": [layer for layer, sparse in enumerate(found.sparse) if not sparse],
        "rms_norm_eps": found.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": found.theta},
        "max_position_embeddings": found.context,
        "tie_word_embeddings": found.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "eos_token_id": list(told["ends"]) or None,
        "pad_token_id": None,
        "dtype": "bfloat16",
    }


def _shard(origin: Drawn, layer: int | None) -> dict[str, Tensor]:
    """The tensors of one layer, or of what is no layer's."""
    found = origin.architecture
    start = "" if layer is None else f"model.layers.{layer}."
    chosen = {
        name: origin.dense(name)
        for name in dense_shapes(found)
        if (name.startswith(start) if layer is not None else not name.startswith("model.layers."))
    }
    if layer is not None and found.sparse[layer]:
        mixture = found.mixtures.index(layer)
        for expert in range(found.experts):
            parts = origin.expert(mixture, expert)
            for part, tensor in zip(("gate", "up", "down"), parts, strict=True):
                chosen[f"{start}mlp.experts.{expert}.{part}_proj.weight"] = tensor
    return chosen
