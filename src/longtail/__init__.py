"""Reinforcement learning of reasoning models, without the long tail of rollouts.

Reading order for a newcomer: `longtail.loop`, `longtail.types`, `longtail.engine.engine`.
"""

__version__ = "0.1.0"
