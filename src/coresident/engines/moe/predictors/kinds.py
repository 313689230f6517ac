"""The predictors, and what each looks at to say which experts a layer will choose next.

`depth` is how many layers ahead they speak. What looks at the same token predicts layer l from layer l - depth and says nothing
of the first `depth` layers. What looks at the token before (or at nothing) speaks of every layer.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

Kind = Literal[
    "chance",
    "static",
    "previous-token",
    "previous-rank",
    "transition",
    "probe",
    "next-router",
    "oracle",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

ABOUT: Final[dict[Kind, str]] = {
    "chance": "experts at random: what any other must beat",
    "static": "those that the fit prompts chose most often",
    "previous-token": "those that the layer chose for the token before, at most k",
    "previous-rank": "those that the layer's router ranked first for the token before",
    "transition": "those that followed most often, in the fit prompts, on what the earlier layer chose",
    "probe": "a logistic regression on the earlier layer's router log-probabilities, fitted on the fit prompts",
    "next-router": "the layer's own router on the state that the earlier layer's router saw",
    "oracle": "those that it will choose: an upper bound, of what fetching ahead can do",
}

# What needs tables that are fitted on the fit prompts.
FITTED: Final[frozenset[Kind]] = frozenset({"static", "transition", "probe"})
# What looks at an earlier layer of the same token, and so says nothing of the first layers. The oracle is held to that too.
ACROSS: Final[frozenset[Kind]] = frozenset({"transition", "probe", "next-router", "oracle"})
# What reads the traces' raw router logits.
READS_LOGITS: Final[frozenset[Kind]] = frozenset({"previous-rank", "probe"})
