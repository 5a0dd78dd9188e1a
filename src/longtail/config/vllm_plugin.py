"""Settings of the plugin in vLLM, which vLLM's additional_config holds under `longtail`."""

from typing import Annotated, Literal

from pydantic import Field

from longtail.config.sections import Name, Section


class VllmSettings(Section):
    """Settings of one engine of vLLM."""

    drafter: Literal["learned"] | None = None
    """`learned`: vLLM learns a drafter of its own; None: the one of speculative_config."""
    depth: Annotated[int, Field(ge=1, le=16)] = 4
    """Most tokens that the learned drafter drafts ahead."""
    begin: Name | None = None
    """Directory of a ridge drafter to begin with."""
