"""Settings of the plugin: from vLLM's additional_config or from the environment. No torch, no vLLM.

LLM(model, additional_config={"longtail": {"drafts": "coupled"}}, speculative_config={...})
LONGTAIL_VLLM=coupled vllm serve ...
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast, get_args

from longtail.errors import ConfigError, JsonError
from longtail.system.strict_json import parse_json

VARIABLE = "LONGTAIL_VLLM"
"""Environment variable that switches the plugin on (coupled, match) or off (off)."""
SPECULATION_VARIABLE = "LONGTAIL_VLLM_SPECULATIVE"
"""Environment variable with a speculative_config as JSON, for frameworks that pass none."""
KEY = "longtail"
"""Name of the settings in vLLM's additional_config."""

Drafts = Literal["coupled", "match"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Settings of one engine.

    Example: parse_settings({"drafts": "match"}) == VllmSettings(drafts="match")
    """

    drafts: Drafts = "coupled"
    """Noise of the drafts: that of the target (coupled), or drafts as vLLM makes them (match)."""
    block_rows: int | None = None
    """Rows per product in linear layers of a CPU engine; None leaves vLLM's products alone."""

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as `parse_settings` reads them."""
        return asdict(self)


def parse_settings(value: object, name: str = f"additional_config.{KEY}") -> VllmSettings:
    """Return the settings in a mapping; ConfigError names an unknown or impossible field."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a table of settings, not {value!r}; {{}} is the default")
    known = [field.name for field in fields(VllmSettings)]
    for key in value:
        if key not in known:
            raise ConfigError(f"{name}.{key} is unknown; the settings are {', '.join(known)}")
    drafts = value.get("drafts", "coupled")
    if drafts not in get_args(Drafts):
        raise ConfigError(f"{name}.drafts must be coupled or match, not {drafts!r}")
    rows = value.get("block_rows")
    if rows is not None and (type(rows) is not int or not 1 <= rows <= 4096):
        raise ConfigError(f"{name}.block_rows must be an integer from 1 to 4096, not {rows!r}")
    return VllmSettings(drafts=cast(Drafts, drafts), block_rows=rows)


def requested(additional_config: object, environment: Mapping[str, str]) -> VllmSettings | None:
    """Return the settings an engine asks for; None if it does not ask.

    `additional_config` goes before the variable, except that LONGTAIL_VLLM=off switches both off.

    Example: requested({}, {"LONGTAIL_VLLM": "coupled"}) == VllmSettings()
    """
    word = environment.get(VARIABLE, "").strip().lower()
    if word not in ("", "off", *get_args(Drafts)):
        raise ConfigError(f"{VARIABLE} must be coupled, match or off, not {word!r}")
    if word == "off":
        return None
    if isinstance(additional_config, Mapping) and KEY in additional_config:
        return parse_settings(additional_config[KEY])
    return VllmSettings(drafts=cast(Drafts, word)) if word else None


def speculation(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the speculative_config in LONGTAIL_VLLM_SPECULATIVE; None without one."""
    text = environment.get(SPECULATION_VARIABLE, "").strip()
    if not text:
        return None
    try:
        value = parse_json(text)
    except JsonError as error:
        raise ConfigError(f"{SPECULATION_VARIABLE} is {error}") from error
    if not isinstance(value, dict) or not value:
        raise ConfigError(
            f"{SPECULATION_VARIABLE} must be a JSON object such as "
            f'{{"method": "eagle3", "model": "DIR", "num_speculative_tokens": 3}}, not {text}'
        )
    return value
