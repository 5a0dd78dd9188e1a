"""The command line: `longtail VERB ...`."""
