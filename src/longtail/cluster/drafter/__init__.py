"""Drafters on their way between workers: offers, texts, and which drafter is served."""
