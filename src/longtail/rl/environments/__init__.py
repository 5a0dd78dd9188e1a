"""Environments: what answers the texts of an episode, in processes that can be killed."""
