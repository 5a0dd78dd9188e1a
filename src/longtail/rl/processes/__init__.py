"""A user's code in processes that can be killed: graders and environments."""
