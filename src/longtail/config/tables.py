"""All fields of the configurations, as docs/configuration.md lists them."""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from longtail.config import files
from longtail.config.drafter import DrafterTrainConfig
from longtail.config.rl import RunConfig
from longtail.config.sft import SftConfig

_COMMANDS: Mapping[str, type[BaseModel]] = {
    "longtail train": RunConfig,
    "longtail sft": SftConfig,
    "longtail drafter train": DrafterTrainConfig,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentedField:
    """A field of a section.

    Example: DocumentedField(key="steps", default=100, text="Number of ...")
    """

    key: str
    default: object
    """Value if the field is not set; None if it is left out."""
    text: str


def tables() -> dict[str, dict[str, list[DocumentedField]]]:
    """Return the fields by command and section."""
    return {command: _sections(model) for command, model in _COMMANDS.items()}


def _sections(model: type[BaseModel]) -> dict[str, list[DocumentedField]]:
    sections: dict[str, list[DocumentedField]] = {}
    for name, info in files.fields_of(model).items():
        section, _, key = name.partition(".")
        default = info.get_default(call_default_factory=True, validated_data={})
        field = DocumentedField(key=key, default=default, text=info.description or "")
        sections.setdefault(section, []).append(field)
    return sections
