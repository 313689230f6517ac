"""What a pack cannot do that learners in processes of their own can, said before anything starts."""

from __future__ import annotations

from coresident.engines.pool.parameters import DPO
from coresident.errors import UserError


def check(parameters: DPO) -> None:
    """Raise UserError for what `sharing: packed` does not do."""
    if parameters.sharing == "packed" and parameters.eval_files:
        raise UserError(
            "sharing: packed evaluates nothing on the way, and eval_files is set",
            "leave eval_files out and evaluate the adapters afterwards (coresident pool evaluate), or use sharing: fork",
        )
