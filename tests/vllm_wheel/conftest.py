"""Tests that run a vLLM wheel: `make test-vllm-wheel` makes its environment and names it."""

import os

collect_ignore_glob = [] if os.environ.get("LONGTAIL_VLLM_PYTHON") else ["test_*.py"]
