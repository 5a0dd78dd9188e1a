import json
import sys

import pytest

from longtail.errors import ConfigError, DataError
from longtail.rl.data.sources import EMBEDDED, HELDOUT, load_rows, source_label

pa = pytest.importorskip("pyarrow")
ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]


def load(source, size=4, seed=0):
    return load_rows(str(source), size, seed)


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.fixture
def datasets(monkeypatch, tmp_path):
    module = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf_cache")
    module.disable_progress_bars()
    return module


def test_jsonl_rows_come_in_order_and_blank_lines_do_not_count(tmp_path):
    text = "\ufeff" + json.dumps(ROWS[0]) + "\r\n\n  \n" + json.dumps(ROWS[1])
    assert load(write(tmp_path / "a.jsonl", text)) == ROWS


def test_a_malformed_line_is_named_by_file_and_line(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"prompt": "x"}\n\n{"prompt": \n')
    with pytest.raises(DataError, match=rf"{path}:3: not valid JSON .* at column 12"):
        load(path)


def test_a_line_that_is_no_object_is_named(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"prompt": "x"}\n["prompt"]\n')
    with pytest.raises(DataError, match=rf"{path}:2: expected an object with columns, found list"):
        load(path)


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"prompt": "x"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=rf"{path}:2: not UTF-8"):
        load(path)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (b'"a\\ud83d"', "a string holds '\\\\ud83d', half of a surrogate pair"),
        (b"9" * 5_000, r"the integer 99999999\.\.\. has 5000 digits"),
        (b"[" * 100_000 + b"]" * 100_000, ".* nested more than 100 deep"),
        (b"[" * 100_000, ".* nested more than 100 deep"),
        (b'"\xed\xa0\xbd"', "not UTF-8"),
    ],
    ids=["surrogate", "digits", "deep", "open", "bytes"],
)
def test_an_extreme_value_is_named_by_file_and_line(tmp_path, value, why):
    path = write(tmp_path / "a.jsonl", b'{"prompt": "x"}\n{"prompt": ' + value + b"}\n")
    with pytest.raises(DataError, match=rf"{path}:2: {why}"):
        load(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train.jsonl", "train.json"])
def test_deep_nesting_in_a_folder_is_refused_before_a_reader_dies_of_it(tmp_path, datasets, name):
    path = write(tmp_path / name, b'{"prompt": "[[["}\n{"prompt": ' + b"[" * 100_000 + b"}\n")
    with pytest.raises(DataError, match=rf"{path}:2: .*nested more than 100 deep"):
        load(f"hf:{tmp_path}")


def test_a_folder_is_refused_by_the_file_and_line_that_is_not_utf8(tmp_path, datasets):
    path = write(tmp_path / "train.csv", b"prompt,answer\nx,\xff\n")
    with pytest.raises(DataError, match=rf"{path}:2: not UTF-8 \(invalid start byte at byte 2\)"):
        load(f"hf:{tmp_path}")


def test_an_empty_folder_file_is_one_sentence(tmp_path, datasets):
    write(tmp_path / "train.jsonl", b"")
    with pytest.raises(DataError, match="cannot be loaded"):
        load(f"hf:{tmp_path}")


def parquet_table(path, **columns):
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table(columns), path)
    return path


def test_a_parquet_value_that_python_cannot_hold_is_named_by_row_and_column(tmp_path):
    offsets = pa.array([0, 2, 3], pa.int32()).buffers()[1]
    bad = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"ok\xff")])
    path = parquet_table(tmp_path / "text.parquet", prompt=["a", "b"], answer=bad)
    with pytest.raises(DataError, match=rf"{path}, row 1, column 'answer': .*can't decode"):
        load(path)
    days = pa.array([0, 2**31 - 1], pa.date32())
    path = parquet_table(tmp_path / "days.parquet", prompt=["a", "b"], day=days)
    with pytest.raises(DataError, match=rf"{path}, row 1, column 'day'"):
        load(path)


def test_a_parquet_file_with_two_columns_of_one_name_is_refused(tmp_path):
    import pyarrow.parquet

    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pyarrow.parquet.write_table(table, tmp_path / "twice.parquet")
    with pytest.raises(DataError, match="several columns of one name"):
        load(tmp_path / "twice.parquet")


def test_parquet_rows_keep_their_structs_and_lists(tmp_path):
    import pyarrow.parquet

    rows = [
        {"prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"ground_truth": "2"}},
        {"prompt": [{"role": "user", "content": "2+2="}], "reward_model": {"ground_truth": "4"}},
    ]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert load(tmp_path / "a.parquet") == rows


def test_a_damaged_parquet_file_is_named(tmp_path):
    path = write(tmp_path / "a.parquet", "not parquet at all")
    with pytest.raises(DataError, match=rf"{path} is not readable parquet"):
        load(path)


@pytest.mark.parametrize("name", ["none.jsonl", "none.parquet"])
def test_a_missing_file_is_named(tmp_path, name):
    with pytest.raises(DataError, match=rf"data.source = .*{tmp_path / name} does not exist"):
        load(tmp_path / name)


def test_a_directory_in_place_of_a_file_is_named(tmp_path):
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(DataError, match=r"a\.jsonl is not a file"):
        load(tmp_path / "a.jsonl")


def test_an_empty_file_is_an_error(tmp_path):
    with pytest.raises(DataError, match="holds no rows"):
        load(write(tmp_path / "a.jsonl", "\n\n"))


def test_errors_name_the_setting_that_asked(tmp_path):
    with pytest.raises(DataError, match=r"data\.heldout = "):
        load_rows("none.jsonl", 1, 0, field="data.heldout")


def test_an_unknown_kind_of_source_lists_the_known_ones_and_the_nearest():
    with pytest.raises(DataError, match=r"did you mean 'running_sums'\?.*\.jsonl.*reasoning_gym"):
        load("running_sms")


def test_a_dataset_saved_to_disk_gives_its_rows(tmp_path, datasets):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    assert load(f"hf:{tmp_path / 'one'}") == ROWS


def test_a_saved_dataset_dict_gives_the_split_asked_for(tmp_path, datasets):
    whole = datasets.Dataset.from_list(ROWS)
    splits = {"train": whole, "test": whole.select([1])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "two")
    assert load(f"hf:{tmp_path / 'two'}") == ROWS
    assert load(f"hf:{tmp_path / 'two'}:test") == ROWS[1:]
    with pytest.raises(DataError, match="no split 'dev'; it has train, test"):
        load(f"hf:{tmp_path / 'two'}:dev")


def test_a_folder_of_data_files_is_a_dataset(tmp_path, datasets):
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "train.jsonl", "\n".join(map(json.dumps, ROWS)))
    assert load(f"hf:{folder}") == ROWS
    assert load(f"hf:{folder}:train[:1]") == ROWS[:1]
    with pytest.raises(DataError, match="cannot be loaded"):
        load(f"hf:{folder}:dev")


class _Hub:
    """A stand-in for `datasets.load_dataset` that raises, or gives ROWS."""

    def __init__(self, monkeypatch, datasets, error=None):
        self.error, self.calls = error, []
        monkeypatch.setattr(datasets, "load_dataset", self)

    def __call__(self, *words, **options):
        self.calls.append((words, options))
        if self.error is not None:
            raise self.error
        return self

    def to_list(self):
        return ROWS


@pytest.mark.parametrize(
    ("source", "words", "split"),
    [
        ("hf:openai/gsm8k", ("openai/gsm8k", None), "train"),
        ("hf:openai/gsm8k/main", ("openai/gsm8k", "main"), "train"),
        ("hf:openai/gsm8k/main:test[:10%]", ("openai/gsm8k", "main"), "test[:10%]"),
    ],
)
def test_a_hub_dataset_has_a_configuration_and_a_split(monkeypatch, datasets, source, words, split):
    hub = _Hub(monkeypatch, datasets)
    assert load(source) == ROWS
    assert hub.calls == [(words, {"split": split, "trust_remote_code": False})]


def _hub_errors():
    missing = type("DatasetNotFoundError", (FileNotFoundError,), {})
    several = "Config name is missing.\nPlease pick one among the available configs: ['main', 'b']"
    return [
        (missing("Dataset 'a/b' doesn't exist on the Hub or cannot be accessed."), "hf auth login"),
        (ConnectionError("Couldn't reach 'a/b' on the Hub"), "saved directory"),
        (ValueError(several), "name one as hf:a/b/CONFIG"),
        (ValueError("BuilderConfig 'c' not found. Available: ['main']"), "as hf:a/b/CONFIG"),
        (ValueError("Unknown split \"dev\". Should be one of ['train']."), "as hf:a/b/c:SPLIT"),
        (RuntimeError("Dataset scripts are no longer supported"), "no longer supported"),
    ]


@pytest.mark.parametrize(("error", "remedy"), _hub_errors(), ids=lambda each: type(each).__name__)
def test_an_error_of_the_hub_is_one_sentence_with_its_remedy(monkeypatch, datasets, error, remedy):
    _Hub(monkeypatch, datasets, error)
    with pytest.raises(DataError) as caught:
        load("hf:a/b/c:dev")
    message = str(caught.value)
    assert message.startswith("data.source = 'hf:a/b/c:dev': the dataset cannot be loaded (")
    assert remedy in message
    assert "\n" not in message


def test_a_missing_dataset_directory_is_named(tmp_path, datasets):
    with pytest.raises(DataError, match=rf"directory {tmp_path / 'none'} does not exist"):
        load(f"hf:{tmp_path / 'none'}")


def test_reasoning_gym_problems_keep_the_entry_of_the_scorer():
    gym = pytest.importorskip("reasoning_gym")
    rows = load("reasoning_gym:basic_arithmetic", size=3, seed=5)
    entries = gym.create_dataset("basic_arithmetic", size=3, seed=5)
    assert [row["reasoning_gym_entry"] for row in rows] == list(entries)
    assert [row["prompt"] for row in rows] == [entry["question"] for entry in entries]


def test_an_unknown_reasoning_gym_task_suggests_the_nearest():
    pytest.importorskip("reasoning_gym")
    with pytest.raises(DataError, match=r"no task 'basic_aritmetic', did you mean .*basic_arithm"):
        load("reasoning_gym:basic_aritmetic")


def test_an_embedded_task_never_shows_a_held_out_problem_in_training():
    train = load(EMBEDDED, size=50)
    heldout = load(EMBEDDED + HELDOUT, size=50)
    assert len(train) == len(heldout) == 50
    shown = {json.dumps(row["prompt"]) for row in train}
    assert shown.isdisjoint(json.dumps(row["prompt"]) for row in heldout)
    assert load(EMBEDDED, size=50) == train != load(EMBEDDED, size=50, seed=1)


@pytest.mark.parametrize(
    ("source", "module", "extra"),
    [
        ("hf:owner/name", "datasets", "data"),
        ("a.parquet", "pyarrow.parquet", "data"),
        ("reasoning_gym:chain_sum", "reasoning_gym", "reasoning-gym"),
    ],
)
def test_a_missing_extra_is_named_with_its_remedy(monkeypatch, tmp_path, source, module, extra):
    write(tmp_path / "a.parquet", "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)  # what import sees where it is not installed
    with pytest.raises(ConfigError, match=rf"pip install 'longtail\[{extra}\]'"):
        load(source)


@pytest.mark.parametrize(
    ("source", "label"),
    [
        ("hf:openai/gsm8k/main:test", "test"),
        ("hf:openai/gsm8k/main", "train"),
        ("hf:owner/name:train[:100]", "train[:100]"),
        ("/data/math.jsonl", "math"),
        ("reasoning_gym:sokoban", "sokoban"),
        ("running_sums:heldout", "running_sums:heldout"),
    ],
)
def test_a_source_has_a_short_label(source, label):
    assert source_label(source) == label
