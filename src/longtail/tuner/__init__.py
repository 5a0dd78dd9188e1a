"""How much to draft, and whether at all: what it costs on this machine, and who decides."""
