"""Sources of rows: files, datasets, generators.

Owns the forms of `data.source`; `longtail.rl.data.prompts` interprets the columns. Each optional
package is imported only by the source that needs it.

    FILE.jsonl | FILE.parquet              rows of a file
    hf:NAME[:SPLIT]                        a hub dataset; NAME is owner/name[/configuration]
    hf:DIRECTORY[:SPLIT]                   saved by `save_to_disk`, or a folder of data files
    reasoning_gym:TASK                     `size` problems drawn from `seed`
    running_sums                           `size` problems drawn from `seed`
    running_sums:heldout                   others, none of which is among those
"""

import difflib
import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from longtail.errors import ConfigError, DataError, JsonError
from longtail.rl.data import sum_task
from longtail.system.strict_json import MAX_DEPTH, parse_json

Row = Mapping[str, Any]

HELDOUT = ":heldout"
EMBEDDED = "running_sums"
"""Source that needs neither a file nor a package, and has held-out problems, too."""
GENERATED = (EMBEDDED, EMBEDDED + HELDOUT)

_JSONS = (".json", ".jsonl")
_TEXTS = (*_JSONS, ".csv")
_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]')
"""A whole JSON string, or a bracket outside of strings."""


def load_rows(source: str, size: int, seed: int, *, field: str = "data.source") -> list[Row]:
    """Read all rows of a file or dataset, or draw `size` problems of a generated source.

    `field` is the setting that errors name. Raises `DataError` for a source that does not exist,
    cannot be read or has no rows, and `ConfigError` for a missing extra.
    """
    where = f"{field} = {source!r}"
    kind, colon, rest = source.partition(":")
    suffix = Path(source).suffix
    rows: list[Row]
    if source in GENERATED:
        rows = list(sum_task.problems(size, seed, heldout=source.endswith(HELDOUT)))
    elif colon and kind == "hf":
        rows = _hf(rest, where=where)
    elif colon and kind == "reasoning_gym":
        rows = _reasoning_gym(rest, size, seed, where=where)
    elif suffix == ".jsonl":
        rows = _jsonl(_existing_file(source, where=where), where=where)
    elif suffix == ".parquet":
        rows = _parquet(_existing_file(source, where=where), where=where)
    else:
        near = difflib.get_close_matches(source, GENERATED, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise DataError(
            f"{where}: unknown kind of source{hint}; expected a .jsonl or .parquet file, "
            f"hf:NAME_OR_DIR[:SPLIT], reasoning_gym:TASK, {EMBEDDED}"
        )
    if not rows:
        raise DataError(f"{where}: it holds no rows")
    return rows


def source_label(source: str) -> str:
    """Return the first part of prompt ids: a split, a file's stem, or a task.

    Example: "hf:openai/gsm8k/main:test" -> "test"; "/data/math.jsonl" -> "math"
    """
    kind, colon, rest = source.partition(":")
    if colon and kind == "hf":
        return _name_and_split(rest)[1]
    if colon and kind == "reasoning_gym":
        return rest
    return source if source in GENERATED else Path(source).stem


def _existing_file(source: str, *, where: str) -> Path:
    path = Path(source).expanduser()
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise DataError(f"{where}: {path.absolute()} {what}")
    return path


def _jsonl(path: Path, *, where: str) -> list[Row]:
    rows: list[Row] = []
    for number, line in _lines(path, where=where):
        if not line.strip():
            continue
        try:
            row = parse_json(line, allow_nan=True)  # a column may contain NaN
        except JsonError as error:
            raise DataError(f"{path}:{number}: {error}") from error
        if not isinstance(row, dict):
            raise DataError(
                f"{path}:{number}: expected an object with columns, found {type(row).__name__}"
            )
        rows.append(row)
    return rows


def _lines(path: Path, *, where: str) -> Iterator[tuple[int, bytes]]:
    """Yield numbers, from 1, and lines of a file, without line ends."""
    try:
        with path.open("rb") as file:
            yield from enumerate((line.rstrip(b"\n") for line in file), start=1)
    except OSError as error:
        raise DataError(f"{where}: {path} cannot be read ({error.strerror})") from error


def _parquet(path: Path, *, where: str) -> list[Row]:
    parquet = import_extra("pyarrow.parquet", extra="data", where=where)
    rows: list[Row] = []
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                raise DataError(f"{where}: {path} has several columns of one name: {names!r:.200}")
            for batch in file.iter_batches():
                rows += _plain(batch, first=len(rows), path=path)
    except DataError:
        raise
    except Exception as error:  # Arrow's errors have no common class
        raise DataError(f"{where}: {path} is not readable parquet ({_reason(error)})") from error
    return rows


def _plain(batch: Any, *, first: int, path: Path) -> list[Row]:
    """Return the rows of an Arrow batch; `first` is the number of its first one."""
    try:
        return batch.to_pylist()
    except Exception:
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            for number in range(len(column)):
                try:
                    column[number].as_py()
                except Exception as error:
                    raise DataError(
                        f"{path}, row {first + number}, column {name!r}: its value cannot be read "
                        f"({_reason(error)})"
                    ) from error
        raise


def _reason(error: BaseException) -> str:
    """Return the first cause of a library's error in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:300] or type(error).__name__


def _name_and_split(rest: str) -> tuple[str, str]:
    """Split NAME[:SPLIT]; a split may itself contain a colon, as in train[:100]."""
    if Path(rest).expanduser().is_dir():
        return rest, "train"
    name, _, split = rest.partition(":")
    return name, split or "train"


def _hf(rest: str, *, where: str) -> list[Row]:
    datasets = import_extra("datasets", extra="data", where=where)
    name, split = _name_and_split(rest)
    directory = Path(name).expanduser()
    try:
        if (directory / "dataset_dict.json").is_file() or (directory / "state.json").is_file():
            return _saved_to_disk(datasets.load_from_disk(str(directory)), split, where=where)
        if directory.is_dir():
            _check_texts(directory, where=where)
            return datasets.load_dataset(str(directory), split=split).to_list()
        if name.startswith((".", "/", "~")) or name.count("/") > 2:
            raise DataError(f"{where}: the directory {directory.absolute()} does not exist")
        return _hub(datasets, name, split)
    except DataError:
        raise
    except Exception as error:  # the library's readers raise errors of many classes
        remedy = _remedy(error, name)
        raise DataError(
            f"{where}: the dataset cannot be loaded ({_reason(error).rstrip('.')}){remedy}"
        ) from error


def _hub(datasets: Any, name: str, split: str) -> list[Row]:
    """Read a split of a hub dataset; no code of it is run."""
    owner_and_name, config = name, None
    if name.count("/") == 2:
        owner_and_name, _, config = name.rpartition("/")
    return datasets.load_dataset(
        owner_and_name, config, split=split, trust_remote_code=False
    ).to_list()


def _remedy(error: Exception, name: str) -> str:
    """Return what to do about an error of `datasets`, as the end of a sentence; may be empty."""
    dataset = "/".join(name.split("/")[:2])
    if type(error).__name__ == "DatasetNotFoundError":
        return f"; see that {dataset} is its id; for a private one, log in with `hf auth login`"
    if isinstance(error, ConnectionError):
        return "; connect, or load it once on a machine that can and give the saved directory"
    if "Config name is missing" in str(error) or "BuilderConfig" in str(error):
        return f"; name one as hf:{dataset}/CONFIG"
    if "split" in str(error):
        return f"; name one as hf:{name}:SPLIT"
    return ""


def _check_texts(directory: Path, *, where: str) -> None:
    """Refuse bad text and deep nesting, which `datasets` reports without a line or dies of."""
    for path in sorted(directory.rglob("*")):
        if path.suffix not in _TEXTS or not path.is_file():
            continue
        depth = 0
        for number, line in _lines(path, where=where):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}:{number}: not UTF-8 ({error.reason} at byte {error.start})"
                ) from error
            for bracket in _BRACKET.findall(line) if path.suffix in _JSONS else ():
                depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(bracket, 0)
                if depth > MAX_DEPTH:
                    raise DataError(
                        f"{path}:{number}: lists or objects are nested more than {MAX_DEPTH} deep: "
                        "flatten them"
                    )


def _saved_to_disk(saved: Any, split: str, *, where: str) -> list[Row]:
    if not isinstance(saved, Mapping):
        return saved.to_list()  # a single split of any name
    if split not in saved:
        raise DataError(f"{where}: there is no split {split!r}; it has {', '.join(saved)}")
    return saved[split].to_list()


def _reasoning_gym(task: str, size: int, seed: int, *, where: str) -> list[Row]:
    gym = import_extra("reasoning_gym", extra="reasoning-gym", where=where)
    known = list(gym.factory.DATASETS)
    if task not in known:
        near = difflib.get_close_matches(task, known, n=3)
        hint = f", did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise DataError(f"{where}: reasoning_gym has no task {task!r}{hint}")
    try:
        entries = gym.create_dataset(task, size=size, seed=seed)
    except (
        ValueError,
        TypeError,
        AssertionError,
    ) as error:  # invalid arguments
        raise DataError(f"{where}: reasoning_gym refuses size {size}: {error}") from error
    return [
        {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "reasoning_gym_task": task,
            "reasoning_gym_entry": entry,
        }
        for entry in (entries[index] for index in range(size))
    ]


def import_extra(module: str, *, extra: str, where: str) -> Any:
    """Return a module of an optional package; ConfigError, which names `where`, without it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{where} needs the package {module.partition('.')[0]} ({error}); install it with: "
            f"pip install 'longtail[{extra}]'"
        ) from error
