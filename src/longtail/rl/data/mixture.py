"""Mixtures of reasoning-gym tasks: problems in proportion to weights, and held-out problems.

A problem is a function of the run's seed, the task with its parameters, the level of the task's
curriculum, and an index. Every position of a mixture belongs to one task; a task whose level may
rise has one problem per level there, of which a run visits that of the present level
(`rl.data.curriculum`).

    weights 2, 1     positions  0  1  2  3  4  5      task a at 0, 2, 3, 5; task b at 1, 4
"""

import contextlib
import dataclasses
import datetime
import difflib
import hashlib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import UnionType
from typing import Any, Literal, Union, final

from longtail.errors import ConfigError, DataError
from longtail.rl.data.sources import Row, import_extra

LEVEL = "reasoning_gym_level"
"""Column with the level of a problem; None without one."""
TASK = "reasoning_gym_task"
"""Column with the name of a problem's task."""

_RESERVED = {"seed": "run.seed", "size": "data.size"}
"""Parameters that the run sets, with the fields that they follow."""
_ATTEMPTS = 100
"""Most problems drawn for one position to find one that is not held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task of a mixture.

    Example: Task(name="chain_sum", weight=2.0, config={"max_terms": 3})
    """

    name: str
    weight: float = 1.0
    config: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that differ from the task's defaults."""
    levels: tuple[int, ...] = ()
    """Levels of the task's curriculum; empty for the parameters alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Rows to train on and held-out rows, which have no prompt in common."""

    train: tuple[Row, ...]
    heldout: tuple[Row, ...]


def mixture(tasks: Sequence[Task], *, size: int, heldout_size: int, seed: int) -> Mixture:
    """Return `size` positions of a mixture to train on, and `heldout_size` held-out problems.

    Held-out problems of a task with levels are spread evenly over them. Raises ConfigError for an
    unknown task or parameter, a wrong value and a level that the task does not have, before any
    problem is made; DataError for a problem that cannot be made.
    """
    gym = import_extra("reasoning_gym", extra="reasoning-gym", where="data.tasks")
    most = max(size, heldout_size)
    makers = [_ProblemMaker(gym, task, index, seed, most) for index, task in enumerate(tasks)]
    positions = schedule([task.weight for task in tasks], size)
    for index, task in enumerate(tasks):
        if index not in positions:
            raise ConfigError(
                f"data.tasks[{index}].weight = {task.weight:g}: none of {size} training prompts "
                f"is of {task.name!r}; raise it, or data.size"
            )
    heldout: list[Row] = []
    for index, number in _numbered(schedule([task.weight for task in tasks], heldout_size)):
        maker = makers[index]
        level = maker.levels[number % len(maker.levels)]
        heldout.append(maker.row("heldout", level, number, frozenset()))
    texts = frozenset(row["prompt"] for row in heldout)
    train = [
        makers[index].row("train", level, number, texts)
        for index, number in _numbered(positions)
        for level in makers[index].levels
    ]
    return Mixture(train=tuple(train), heldout=tuple(heldout))


def schedule(weights: Sequence[float], size: int) -> list[int]:
    """Return the index of a weight for each position, in proportion at every position.

    Each position goes to the weight that is furthest behind its share.

    Example: schedule([2, 1], 6) == [0, 1, 0, 0, 1, 0]
    """
    total = sum(weights)
    shares = [weight / total for weight in weights]
    counts = [0] * len(weights)
    order = []
    for position in range(1, size + 1):
        behind = [share * position - count for share, count in zip(shares, counts, strict=True)]
        index = behind.index(max(behind))
        counts[index] += 1
        order.append(index)
    return order


def _numbered(order: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each index with the number of its earlier occurrences."""
    counts: dict[int, int] = {}
    for index in order:
        yield index, counts.get(index, 0)
        counts[index] = counts.get(index, 0) + 1


@final
class _ProblemMaker:
    """Makes the problems of one task; the constructor checks its parameters."""

    def __init__(self, gym: Any, task: Task, index: int, seed: int, size: int) -> None:
        self._gym, self._task, self._seed, self._size = gym, task, seed, size
        self._where = f"data.tasks[{index}]"
        self._datasets: dict[tuple[str, int | None, int], Any] = {}
        self._check_name()
        self._config = self._checked_config()
        self.levels: tuple[int | None, ...] = task.levels or (None,)
        """Levels, or None alone."""
        self._settings = {level: self._settings_of(level) for level in self.levels}

    def row(self, part: str, level: int | None, number: int, without: frozenset[str]) -> Row:
        """Return a problem whose prompt is not among `without`."""
        for attempt in range(_ATTEMPTS):
            entry = self._entry(part, level, number, attempt)
            if entry["question"] not in without:
                break
        else:
            raise DataError(
                f"{self._where}: {self._task.name!r} has too few different problems: {_ATTEMPTS} "
                "in a row are held out; lower data.heldout_size, or widen its config"
            )
        place = [] if level is None else [f"level{level}"]
        start = ["heldout"] if part == "heldout" else []
        return {
            "id": "/".join([*start, self._task.name, *place, str(number)]),
            "prompt": entry["question"],
            "answer": entry["answer"],
            TASK: self._task.name,
            "reasoning_gym_entry": entry,
            "reasoning_gym_config": self._settings[level],
            LEVEL: level,
        }

    def _entry(self, part: str, level: int | None, number: int, attempt: int) -> dict[str, Any]:
        key = (part, level, attempt)
        try:
            if key not in self._datasets:
                self._datasets[key] = self._gym.create_dataset(
                    self._task.name,
                    seed=_seed(self._seed, self._task.name, *key),
                    size=self._size,
                    **self._settings[level],
                )
            return self._datasets[key][number]
        except Exception as error:  # generators raise errors of any class
            at = "" if level is None else f" of level {level}"
            raise DataError(
                f"{self._where}: reasoning_gym cannot make problem {number}{at} of "
                f"{self._task.name!r} ({type(error).__name__}: {str(error)[:200]}); choose other "
                "parameters" + ("" if level is None else ", or lower the level")
            ) from error

    def _check_name(self) -> None:
        name, known = self._task.name, sorted(set(self._gym.factory.DATASETS) - {"composite"})
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else ", ".join(known)
            raise ConfigError(
                f"{self._where}.name = {name!r}: reasoning_gym has no such task; {hint}"
            )

    def _checked_config(self) -> dict[str, Any]:
        """Return the parameters as the types of the task's own configuration."""
        config_class = self._gym.factory.DATASETS[self._task.name][1]
        types = typing.get_type_hints(config_class)
        known = [each.name for each in dataclasses.fields(config_class)]
        names = [name for name in known if name not in _RESERVED]
        checked = {}
        for name, value in self._task.config.items():
            at = f"{self._where}.config.{name}"
            if name in _RESERVED:
                raise ConfigError(f"{at}: it follows {_RESERVED[name]}; leave it out")
            if name not in known:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ConfigError(
                    f"{at}: {self._task.name!r} has no such parameter; {hint}it has "
                    f"{', '.join(names)}"
                )
            try:
                checked[name] = _converted(value, types[name])
            except (TypeError, ValueError) as error:
                kind = str(types[name]).removeprefix("<class '").removesuffix("'>")
                raise ConfigError(f"{at} = {value!r:.80}: it must be of type {kind}") from error
        return checked

    def _settings_of(self, level: int | None) -> dict[str, Any]:
        """Return the parameters of a level that differ from the task's defaults."""
        config_class = self._gym.factory.DATASETS[self._task.name][1]
        settings = dict(self._config)
        if level is not None:
            settings |= self._attributes(level)
        try:
            config = config_class(**settings)
            if "validate" in vars(config_class):
                config.validate()
        except (AssertionError, ValueError, TypeError) as error:
            at = "config" if level is None else f"level {level}"
            raise ConfigError(
                f"{self._where}: {self._task.name!r} refuses its {at}: {error}"
            ) from error
        return settings

    def _attributes(self, level: int) -> dict[str, Any]:
        """Return the parameters that the task's curriculum sets at a level."""
        name = self._task.name
        if name not in self._gym.factory.CURRICULA:
            raise ConfigError(f"{self._where}.level = {level}: {name!r} has no curriculum")
        curriculum = self._gym.factory.create_curriculum(name)
        attributes = curriculum.attributes.values()
        highest = max((len(each.levels) for each in attributes), default=1) - 1
        if level > highest:
            raise ConfigError(
                f"{self._where}: the curriculum of {name!r} has levels 0 to {highest}, not {level}"
            )
        curriculum.set_global_level(level)
        config = curriculum.generate_configuration()
        fields = [
            field_name
            for each in attributes
            for key in ("field_name", "lower_field_name", "upper_field_name")
            if (field_name := getattr(each, key, None)) is not None
        ]
        for field_name in fields:
            if field_name in self._config:
                raise ConfigError(
                    f"{self._where}.config.{field_name}: the level of {name!r} sets it; leave one "
                    "of them out"
                )
        return {field_name: getattr(config, field_name) for field_name in fields}


def _converted(value: Any, kind: Any) -> Any:
    """Return a value of TOML as the annotated type. Raises TypeError or ValueError."""
    origin, options = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (Union, UnionType):
        for option in options:
            with contextlib.suppress(TypeError, ValueError):
                return _converted(value, option)
    elif origin is Literal and value in options:
        return value
    elif origin in (list, tuple, Sequence) and isinstance(value, list):
        inner = options[0] if options else Any
        items = [_converted(item, inner) for item in value]
        return tuple(items) if origin is tuple else items
    elif origin in (datetime.date, datetime.time) and isinstance(value, str):
        return origin.fromisoformat(value)
    elif isinstance(origin, type) and issubclass(origin, Enum):
        return origin(value)
    elif origin is float and type(value) is int:
        return float(value)
    elif origin is Any or type(value) is origin:
        return value
    raise TypeError(value)


def _seed(*parts: object) -> int:
    """Return a seed of 31 bits, as numpy takes it, by a hash of the parts."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) >> 1
