"""What a pack cannot do yet that learners in processes of their own can, said before anything starts."""

from __future__ import annotations

from coresident.engines.pool.parameters import DPO
from coresident.errors import UserError


def check(parameters: DPO) -> None:
    """Raise UserError for what `sharing: packed` does not do."""
    if parameters.sharing != "packed":
        return
    for name, asked in (
        ("checkpoint_every", parameters.checkpoint_every > 0),
        ("eval_files", bool(parameters.eval_files)),
    ):
        if asked:
            raise UserError(
                f"sharing: packed keeps and evaluates nothing on the way, and {name} is set",
                f"leave {name} out, or use sharing: fork",
            )
