"""Additions to coupled drafts: metrics, and new drafter weights while running.

Texts depend on none of it. So a vLLM that a part does not fit runs without the part, and says why.
"""

import logging
from collections.abc import Callable

from longtail.errors import ConfigError
from longtail.integrations.vllm import guards

logger = logging.getLogger("vllm.plugins.longtail")
_done: set[str] = set()


def in_front_end() -> None:
    """Extend vLLM's metrics, once."""
    from longtail.integrations.vllm import metrics

    _try("metrics", lambda: guards.replace(metrics.patches()))


def in_worker() -> None:
    """Add the methods that replace the drafter's weights, once."""
    from longtail.integrations.vllm import adopt, transfer

    _try("adoption of drafters", lambda: guards.replace(adopt.patches()))
    _try("vLLM's calls for draft weights", transfer.install)


def _try(name: str, install: Callable[[], object]) -> None:
    if name in _done:
        return
    _done.add(name)
    try:
        install()
    except ConfigError as error:
        logger.warning("longtail: without %s: %s", name, error)
