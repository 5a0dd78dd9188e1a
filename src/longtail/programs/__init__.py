"""The commands `sft`, `merge`, `drafter train`, `eval`, `import` and `export`."""
