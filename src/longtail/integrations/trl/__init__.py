"""longtail as the generation engine of TRL's GRPO and RLOO trainers: `longtail_rollouts`.

with longtail_rollouts(drafter="auto") as rollouts:      # use_vllm=True now means longtail
    trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True), callbacks=[rollouts.callback()])
    trainer.train()
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import the integration, and with it TRL, when it is first used."""
    if name not in ("longtail_rollouts", "Rollouts"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from longtail.integrations.trl import patches

    patches.require_trl()
    from longtail.integrations.trl import rollouts

    return getattr(rollouts, name)
