"""What keeps a router from sending everything to a few experts: the load-balancing and the router-z loss.

Both are means over layers of a layer's own value, as OLMoE was trained (arXiv 2409.02060). transformers adds up the
layers before it multiplies, and so finds balance where each layer has collapsed on other experts; of one layer the
two agree.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """What the routers did, a tensor a layer; N = B T tokens in order.

    `logits` [N, E] in float32 (float64 for a float64 model), before the softmax; `experts` [N, K] of int64, the
    likeliest first.
    """

    logits: tuple[Tensor, ...]
    experts: tuple[Tensor, ...]


def load_balancing(logits: Tensor, experts: Tensor, counted: Tensor) -> Tensor:
    """E sum_e f_e P_e of one layer (Switch Transformer, arXiv 2101.03961, equations 4 to 6, for K experts a token).

    f_e is how many of the tokens were sent to e, over all tokens, so that it sums to K, and P_e the mean probability
    of e; perfect balance gives K. Tokens weigh as `counted` [N] says (1 or 0).
    """
    count = logits.shape[1]
    tokens = counted.sum().clamp(min=1)
    sent = (experts[:, :, None] == torch.arange(count, device=logits.device)).sum(1)
    fractions = (sent * counted[:, None]).sum(0) / tokens
    probabilities = (logits.softmax(-1) * counted[:, None]).sum(0) / tokens
    return count * (fractions * probabilities).sum()


def router_z(logits: Tensor, counted: Tensor) -> Tensor:
    """The mean of log(sum_e exp(logit_e))^2 of one layer (ST-MoE, arXiv 2202.08906, equation 5)."""
    return (logits.logsumexp(-1).square() * counted).sum() / counted.sum().clamp(min=1)


def auxiliary(routing: Routing, counted: Tensor, balance: float, z: float) -> Tensor:
    """balance * load_balancing + z * router_z, each the mean over layers, over the tokens that count; a scalar."""
    counted = counted.to(routing.logits[0].dtype)
    layers = [
        balance * load_balancing(logits, experts, counted) + z * router_z(logits, counted)
        for logits, experts in zip(routing.logits, routing.experts, strict=True)
    ]
    return torch.stack(layers).mean()
