"""Sources of rows: files, datasets, generators.

Owns the forms of `data.source`; `longtail.rl.data.prompts` interprets the columns. Each optional
package is imported only by the source that needs it.

    FILE.jsonl                             an object with columns in each line
    FILE.parquet                           rows of a file
    hf:NAME[:SPLIT]                        a hub dataset; NAME is owner/name[/configuration]
    hf:DIRECTORY[:SPLIT]                   saved by `save_to_disk`, or a folder of data files
    reasoning_gym:TASK                     `size` problems drawn from `seed`
    reasoning_gym:FILE.yaml                the same of a mixture, as reasoning-gym's CompositeConfig
    seeds                                  `size` numbers, for environments that begin by one
    running_sums                           `size` problems drawn from `seed`
    running_sums:heldout                   others, none of which is among those
"""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longtail.errors import DataError, JsonError, did_you_mean
from longtail.rl.data import sum_task
from longtail.system.files import parse_json
from longtail.system.machine import import_extra

Row = Mapping[str, Any]

HELDOUT = ":heldout"
SEEDS = "seeds"
"""Source of rows with no prompt but what an environment says."""
EMBEDDED = "running_sums"
"""Source that needs neither a file nor a package, and has held-out problems, too."""
GENERATED = (EMBEDDED, EMBEDDED + HELDOUT)

_REMEDY = (
    "; see that it, its configuration (hf:OWNER/NAME/CONFIG) and its split (hf:NAME:SPLIT) exist, "
    "and log in with `hf auth login` if it is private"
)

TASK = "reasoning_gym_task"
"""Column with the name of a problem's task."""


def load_rows(source: str, size: int, seed: int, *, field: str = "data.source") -> list[Row]:
    """Read all rows of a file or dataset, or draw `size` problems of a generated source.

    `field` is the setting that errors name. Raises `DataError` for a source that does not exist,
    cannot be read or has no rows, and `ConfigError` for a missing extra.
    """
    where = f"{field} = {source!r}"
    kind, _, rest = source.partition(":")
    if source in GENERATED:
        rows: list[Row] = list(sum_task.problems(size, seed, heldout=source.endswith(HELDOUT)))
    elif source == SEEDS:
        rows = [{"prompt": "", "seed": seed + number} for number in range(size)]
    elif kind == "reasoning_gym":
        rows = _reasoning_gym(rest, size, seed, where=where)
    elif kind == "hf":
        rows = _datasets(*_name_and_split(rest), where=where)
    elif source.endswith(".jsonl"):
        rows = _jsonl(_existing_file(source, where=where))
    elif source.endswith(".parquet"):
        rows = _datasets(str(_existing_file(source, where=where)), "train", where=where)
    else:
        raise DataError(
            f"{where}: unknown kind of source; expected a .jsonl or .parquet file, "
            f"hf:NAME_OR_DIR[:SPLIT], reasoning_gym:TASK, {EMBEDDED}, {SEEDS}"
        )
    if not rows:
        raise DataError(f"{where}: it holds no rows")
    return rows


def source_label(source: str) -> str:
    """Return the first part of prompt ids: a split, a file's stem, or a task.

    Example: "hf:openai/gsm8k/main:test" -> "test"; "/data/math.jsonl" -> "math"
    """
    kind, _, rest = source.partition(":")
    if kind == "hf":
        return _name_and_split(rest)[1]
    if kind == "reasoning_gym":
        return Path(rest).stem
    return source if source in GENERATED else Path(source).stem


def _existing_file(path: str, *, where: str) -> Path:
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"{where}: {file.absolute()} does not exist or is not a file")
    return file


def _jsonl(path: Path) -> list[Row]:
    """Read JSON lines; unlike `datasets`, columns may mix types, and nothing is converted."""
    rows: list[Row] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line, allow_nan=True)  # a column may contain NaN
        except JsonError as error:
            raise DataError(f"{path}:{number}: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: expected an object, found {type(row).__name__}")
        rows.append(row)
    return rows


def _name_and_split(rest: str) -> tuple[str, str]:
    """Split NAME[:SPLIT]; a split may itself contain a colon, as in train[:100]."""
    if Path(rest).expanduser().is_dir():
        return rest, "train"
    name, _, split = rest.partition(":")
    return name, split or "train"


def _datasets(name: str, split: str, *, where: str) -> list[Row]:
    """Read a split of a hub dataset, a folder or a parquet file; none of its code is run."""
    datasets = import_extra("datasets", "data", where)
    path = Path(name).expanduser()
    if name.startswith((".", "/", "~")) and not path.exists():
        raise DataError(f"{where}: the directory {path.absolute()} does not exist")
    with _explained(f"{where}: the dataset cannot be loaded", "" if path.exists() else _REMEDY):
        if path.is_file():
            return datasets.load_dataset("parquet", data_files=str(path), split=split).to_list()
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            saved = datasets.load_from_disk(str(path))
            return (saved[split] if isinstance(saved, Mapping) else saved).to_list()
        parts = [str(path)] if path.is_dir() else name.split("/", 2)
        hub_id, config = "/".join(parts[:2]), parts[2] if len(parts) > 2 else None
        rows = datasets.load_dataset(hub_id, config, split=split, trust_remote_code=False)
        return rows.to_list()


def _reasoning_gym(name: str, size: int, seed: int, *, where: str) -> list[Row]:
    """Draw problems of a task, or of the mixture of tasks in a YAML file."""
    gym = import_extra("reasoning_gym", "reasoning-gym", where)
    specs: list[Any] = []
    hint = did_you_mean(name, gym.factory.DATASETS)
    with _explained(f"{where}: reasoning_gym refuses it", hint):
        if is_mixture := Path(name).suffix in (".yaml", ".yml"):
            composite = importlib.import_module("reasoning_gym.composite")
            file = str(_existing_file(name, where=where))
            specs = composite.CompositeConfig.from_yaml(file).datasets
            problems = gym.create_dataset("composite", size=size, seed=seed, datasets=specs)
        else:
            problems = gym.create_dataset(name, size=size, seed=seed)
        configs = {spec.name: spec.config for spec in specs}
        return [
            {
                "prompt": entry["question"],
                "answer": entry["answer"],
                TASK: (task := entry["metadata"]["source_dataset"] if is_mixture else name),
                "reasoning_gym_entry": entry,
                "reasoning_gym_config": configs.get(task, {}),
            }
            for entry in (problems[index] for index in range(size))
        ]


@contextmanager
def _explained(what: str, remedy: str) -> Iterator[None]:
    """Raise any error of a library as DataError, with its first cause in one line."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        why = " ".join(f"{type(cause).__name__}: {cause}".split())[:500]
        raise DataError(f"{what} ({why}){remedy}") from error
