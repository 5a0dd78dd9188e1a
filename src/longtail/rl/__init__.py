"""Reinforcement learning: prompts, rewards, advantages, packing, losses, the learner."""
