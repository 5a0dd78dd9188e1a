"""The machine: processors, memory, files, signals."""
