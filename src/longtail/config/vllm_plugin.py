"""Settings of the plugin in vLLM, which vLLM's additional_config holds under `longtail`."""

from typing import Annotated, Literal

from pydantic import Field

from longtail.config.sections import Name, Section


class VllmSettings(Section):
    """Settings of one engine of vLLM."""

    drafts: Literal["coupled", "match"] = "coupled"
    """Noise of the drafts: that of the target (coupled), or drafts as vLLM makes them (match)."""
    block_rows: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Rows per product in linear layers of a CPU engine; None leaves vLLM's products alone."""
    drafter: Literal["learned"] | None = None
    """`learned`: vLLM learns a drafter of its own; None: the one of speculative_config."""
    depth: Annotated[int, Field(ge=1, le=16)] = 4
    """Most tokens that the learned drafter drafts ahead."""
    history: bool = True
    """Whether it also copies from the request's own tokens and those of the same prompt."""
    begin: Name | None = None
    """Directory of a ridge drafter to begin with."""

    def of_process(self) -> "VllmSettings":
        """Return those that all engines of a process share: theirs are the functions of vLLM."""
        return VllmSettings(drafts=self.drafts, block_rows=self.block_rows)
