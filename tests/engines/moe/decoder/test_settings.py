"""Every setting of a config that changes numbers is computed: what transformers says, of models that differ in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from coresident.engines.moe import assemble
from coresident.engines.moe.parameters import Decode

COMMON = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("olmoe", {"rope_parameters": {"rope_type": "default", "rope_theta": 40.0}}),
    ("olmoe", {"rms_norm_eps": 0.3}),
    ("olmoe", {"clip_qkv": 0.4}),
    ("olmoe", {"tie_word_embeddings": True}),
    ("olmoe", {"norm_topk_prob": True}),
    ("olmoe", {"num_experts_per_tok": 1}),
    ("olmoe", {"num_experts_per_tok": 6}),
    ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ("qwen3", {"rms_norm_eps": 0.3}),
    ("qwen3", {"norm_topk_prob": True, "head_dim": 20}),
    ("qwen3", {"decoder_sparse_step": 2, "num_hidden_layers": 4}),
    ("qwen3", {"mlp_only_layers": [0]}),
]


@pytest.mark.parametrize(("kind", "given"), SETTINGS, ids=lambda value: str(value).replace(" ", ""))
def test_a_setting_is_computed(kind: str, given: dict[str, Any], tmp_path: Path) -> None:
    from transformers import OlmoeConfig, OlmoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    settings = {**COMMON, **given}
    model: Any = (
        OlmoeForCausalLM(OlmoeConfig(**settings))
        if kind == "olmoe"
        else Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings))
    )
    model.save_pretrained(tmp_path / "model")
    asked = Decode.model_validate({"model": {"path": str(tmp_path / "model")}})
    engine = assemble.build(asked, assemble.open_model(asked.model), torch.device("cpu"), 40, 1)
    tokens = torch.randint(0, 50, (40,)).tolist()
    scores = [*engine.decoder.prefill([tokens[:30]], every=True)]
    scores += [engine.decoder.step(torch.tensor([token]))[0] for token in tokens[30:]]
    engine.close()
    with torch.inference_mode():
        wanted = model.eval()(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(torch.stack(scores), wanted, rtol=0, atol=1e-4)
