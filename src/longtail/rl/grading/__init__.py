"""Rewards, and the processes that compute them."""
