"""Tests that run vLLM's own sampling code: `make test-vllm` fetches its sources and names them."""

import os

collect_ignore_glob = [] if os.environ.get("LONGTAIL_VLLM_SOURCES") else ["test_*.py"]
