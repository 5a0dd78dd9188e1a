"""The cost model of steps and drafts, and the tuners that decide how much to draft."""
