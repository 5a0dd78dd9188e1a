import json
import sys

import pytest

from longtail.errors import ConfigError, DataError
from longtail.rl.data.sources import EMBEDDED, HELDOUT, load_rows, source_label
from longtail.rl.grading.reward import GradingTask, reward_factory

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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "x"}\n\n{"prompt": \n', "{path}:3: not valid JSON .* column 12"),
        ('{"prompt": "x"}\n["prompt"]\n', "{path}:2: expected an object, found list"),
        (b'{"prompt": "x"}\n{"prompt": "\xff"}\n', "{path}:2: not UTF-8"),
        ("\n\n", "holds no rows"),
        (None, "data.source = .*{path} does not exist"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path, text, message):
    path = tmp_path / "a.jsonl"
    if text is not None:
        write(path, text)
    with pytest.raises(DataError, match=message.format(path=path)):
        load(path)


def test_parquet_rows_keep_their_structs_and_lists(tmp_path, datasets):
    import pyarrow.parquet

    message = {"role": "user", "content": "1+1="}
    rows = [{"prompt": [message], "reward_model": {"ground_truth": "2"}}]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert load(tmp_path / "a.parquet") == rows


@pytest.mark.parametrize("name", ["a.parquet", "folder/train.csv", "folder/train.jsonl"])
def test_a_damaged_file_is_one_sentence_that_names_the_source(tmp_path, datasets, name):
    (tmp_path / "folder").mkdir()
    path = write(tmp_path / name, b"PAR1\xff\n[1")
    source = path if path.suffix == ".parquet" else f"hf:{path.parent}"
    with pytest.raises(
        DataError, match=rf"data\.source = '{source}': .*cannot be loaded"
    ) as caught:
        load(source)
    assert "\n" not in str(caught.value)


def test_an_unknown_kind_of_source_lists_the_known_ones():
    with pytest.raises(DataError, match=r"unknown.*\.jsonl.*reasoning_gym.*running_sums"):
        load("running_sms")


def test_a_dataset_saved_to_disk_gives_the_rows_of_its_split(tmp_path, datasets):
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(tmp_path / "one")
    assert load(f"hf:{tmp_path / 'one'}") == ROWS
    splits = {"train": whole, "test": whole.select([1])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "two")
    assert load(f"hf:{tmp_path / 'two'}") == ROWS
    assert load(f"hf:{tmp_path / 'two'}:test") == ROWS[1:]
    with pytest.raises(DataError, match=r"cannot be loaded .*dev"):
        load(f"hf:{tmp_path / 'two'}:dev")


def test_a_folder_of_data_files_is_a_dataset(tmp_path, datasets):
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "train.jsonl", "\n".join(map(json.dumps, ROWS)))
    assert load(f"hf:{folder}") == ROWS
    assert load(f"hf:{folder}:train[:1]") == ROWS[:1]


@pytest.mark.parametrize(
    ("source", "words", "split"),
    [
        ("hf:openai/gsm8k", ("openai/gsm8k", None), "train"),
        ("hf:openai/gsm8k/main:test[:10%]", ("openai/gsm8k", "main"), "test[:10%]"),
    ],
)
def test_a_hub_dataset_has_a_configuration_and_a_split(monkeypatch, datasets, source, words, split):
    def refuse(*given, **options):
        assert (given, options) == (words, {"split": split, "trust_remote_code": False})
        raise ConnectionError("Couldn't reach\nthe hub")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataError) as caught:
        load(source)
    assert str(caught.value).startswith(f"data.source = {source!r}: the dataset cannot be loaded (")
    assert "Couldn't reach the hub); see that it, its configuration" in str(caught.value)


def test_reasoning_gym_problems_keep_the_entry_of_the_scorer():
    gym = pytest.importorskip("reasoning_gym")
    rows = load("reasoning_gym:basic_arithmetic", size=3, seed=5)
    entries = gym.create_dataset("basic_arithmetic", size=3, seed=5)
    assert [row["reasoning_gym_entry"] for row in rows] == list(entries)
    assert [row["prompt"] for row in rows] == [entry["question"] for entry in entries]
    with pytest.raises(DataError, match=r"'basic_aritmetic' not reg.*did you mean basic_arithm"):
        load("reasoning_gym:basic_aritmetic")


def test_a_mixture_of_reasoning_gym_is_scored_by_the_task_of_each_problem(tmp_path):
    pytest.importorskip("reasoning_gym")
    mixture = """
datasets:
  - {name: spell_backward, weight: 1, config: {min_word_len: 5}}
  - {name: gcd, weight: 3, config: {max_value: 50}}
"""
    rows = load(f"reasoning_gym:{write(tmp_path / 'mix.yaml', mixture)}", size=40, seed=5)
    assert rows == load(f"reasoning_gym:{tmp_path / 'mix.yaml'}", size=40, seed=5)
    assert {row["reasoning_gym_task"] for row in rows} == {"spell_backward", "gcd"}
    reward = reward_factory("reasoning_gym")()
    for row in rows:
        right = GradingTask(prompt=row["prompt"], text=row["answer"], tokens=(), data=row)
        assert reward.grade(right) == 1.0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("datasets: [{name: gdc, weight: 1, config: {}}]", "Dataset 'gdc' not registered"),
        ("datasets: [{name: gcd, weight: 1, config: {most: 2}}]", "'most'"),
        ("datasets: [", "ParserError"),
    ],
)
def test_a_mixture_that_does_not_fit_says_why(tmp_path, text, why):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(DataError, match=rf"data\.source = .*mix\.yaml'.*{why}"):
        load(f"reasoning_gym:{write(tmp_path / 'mix.yaml', text)}")


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
        ("reasoning_gym:chain_sum", "reasoning_gym", "reasoning-gym"),
    ],
)
def test_a_missing_extra_is_named_with_its_remedy(monkeypatch, source, module, extra):
    monkeypatch.setitem(sys.modules, module, None)  # what import sees where it is not installed
    with pytest.raises(ConfigError, match=rf"pip install .*\[{extra}\]'"):
        load(source)


@pytest.mark.parametrize(
    ("source", "label"),
    [
        ("hf:openai/gsm8k/main:test", "test"),
        ("hf:owner/name:train[:100]", "train[:100]"),
        ("/data/math.jsonl", "math"),
        ("reasoning_gym:tasks/mix.yaml", "mix"),
        ("running_sums:heldout", "running_sums:heldout"),
    ],
)
def test_a_source_has_a_short_label(source, label):
    assert source_label(source) == label
