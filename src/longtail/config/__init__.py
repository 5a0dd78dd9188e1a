"""Configurations: frozen pydantic trees, their TOML files and command-line options."""
