"""A model's shape as transformers writes it (`config.json` of Llama and OLMoE), and back.

Written by hand, so that an export needs no transformers and does not change with its version; read strictly, since a
setting that we do not compute (grouped key heads, biases, stretched positions) would load well and say nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from coresident.errors import UserError
from coresident.model.shape import Mixture, ModelShape

# OLMoE has no key for the router-z loss; transformers keeps what it does not know.
_ROUTER_Z = "router_z_loss_coef"
_ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "clip_qkv": None,
    "rope_scaling": None,
}


def config_of(shape: ModelShape) -> dict[str, Any]:
    """`config.json` of the shape; raises UserError for one that no architecture of transformers computes."""
    if shape.qk_norm != (shape.mixture is not None):
        raise UserError(
            "transformers has no such model: its Llama has no QK norm, and its OLMoE always has one",
            "take a dense model without qk_norm, or a mixture with it",
        )
    config: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.eps,
        # transformers 5 reads the second, everything older the first.
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": shape.tied,
        "dtype": "float32",
    }
    mixture = shape.mixture
    if mixture is None:
        return config | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "intermediate_size": shape.feedforward,
            "head_dim": shape.head_width,
            "mlp_bias": False,
        }
    return config | {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "intermediate_size": mixture.width,
        "num_experts": mixture.experts,
        "num_experts_per_tok": mixture.top_k,
        "norm_topk_prob": mixture.normalise,
        "router_aux_loss_coef": mixture.balance,
        "clip_qkv": None,
        _ROUTER_Z: mixture.z,
    }


def shape_of(config: Mapping[str, Any], where: str) -> ModelShape:
    """The shape that `config` describes; raises UserError, beginning with `where`, for one that we do not compute."""
    kind = config.get("model_type")
    if kind not in ("llama", "olmoe"):
        raise UserError(f"{where}: model_type is {kind!r}", "give a directory of a Llama or OLMoE model")
    for key, wanted in _ONLY.items():
        if config.get(key, wanted) != wanted:
            raise UserError(
                f"{where}: {key} is {config[key]!r}, and only {wanted!r} is computed here",
                "give a model without it",
            )
    try:
        return _shape(config, kind)
    except KeyError as error:
        raise UserError(
            f"{where}: it has no {error.args[0]}", "copy config.json again from its source"
        ) from None
    except ValidationError as error:
        said = error.errors()[0]
        key = ".".join(map(str, said["loc"])) or "the shape"
        raise UserError(f"{where}: {key}: {said['msg']}", "copy config.json again from its source") from None
    except ValueError as error:
        raise UserError(f"{where}: {error}", "give a model without it") from None


def _shape(config: Mapping[str, Any], kind: str) -> ModelShape:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    # null in either is transformers' way to say: as the sizes above have it.
    if (config.get("num_key_value_heads") or heads) != heads:
        raise ValueError("it has fewer key heads than query heads (num_key_value_heads)")
    if (config.get("head_dim") or width // heads) != width // heads:
        raise ValueError("its heads are not the width split evenly (head_dim)")
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"its positions are of type {rope['rope_type']!r} (rope_parameters)")
    mixture = None
    if kind == "olmoe":
        mixture = Mixture(
            experts=config["num_experts"],
            top_k=config["num_experts_per_tok"],
            width=config["intermediate_size"],
            normalise=config.get("norm_topk_prob", False),
            balance=config.get("router_aux_loss_coef", 0.01),
            z=config.get(_ROUTER_Z, 0.001),
        )
    return ModelShape(
        vocabulary=config["vocab_size"],
        layers=config["num_hidden_layers"],
        width=width,
        heads=heads,
        feedforward=None if mixture else config["intermediate_size"],
        context=config["max_position_embeddings"],
        rope_theta=rope.get("rope_theta") or config.get("rope_theta", 1e4),
        eps=config["rms_norm_eps"],
        qk_norm=mixture is not None,
        tied=config.get("tie_word_embeddings", False),
        mixture=mixture,
    )
