"""The reader of tensors: what is not as wanted is refused with file, tensor and remedy."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longtail.errors import ConfigError
from longtail.system import tensor_files
from longtail.system.tensor_files import Kind

WANTED = {
    "a": Kind(shape=(2, 3)),
    "ids": Kind(shape=(None,), dtypes=("int64",), below=10, is_distinct=True),
}


def _good() -> dict[str, Tensor]:
    return {"a": torch.ones(2, 3), "ids": torch.tensor([0, 9])}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.safetensors"


def test_what_was_saved_is_read_with_every_bit(path):
    whole = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    mine = _good() | {"a": whole[2:]}
    tensor_files.save(mine, path)
    found = tensor_files.read(path, WANTED)
    assert all(torch.equal(found[name], mine[name]) for name in mine)
    assert found.keys() == mine.keys()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"a": torch.ones(3, 2)}, r"a is float32 of shape \[3, 2\], wanted is .*of shape \[2, 3\]"),
        ({"a": torch.ones(6)}, r"a is float32 of shape \[6\]"),
        ({"a": torch.ones(2, 3, dtype=torch.int64)}, "a is int64 .*wanted is float32 or"),
        ({"a": torch.ones(2, 3, dtype=torch.bool)}, "a is bool "),
        ({"a": torch.full((2, 3), torch.nan)}, "a holds 6 values that are NaN or infinite of 6"),
        ({"a": torch.tensor([[1, 2, 3], [1, torch.inf, 3]])}, "a holds 1 values that are NaN"),
        ({"ids": torch.tensor([0, 9], dtype=torch.int32)}, "ids is int32 .*wanted is int64"),
        ({"ids": torch.tensor([[0, 9]])}, r"ids is int64 of shape \[1, 2\].*of shape \[any\]"),
        ({"ids": torch.tensor([0, 10])}, "ids holds the token 10, of 10 tokens"),
        ({"ids": torch.tensor([-1, 3])}, "ids holds the token -1, of 10 tokens"),
        ({"ids": torch.tensor([3, 3])}, "ids holds a token twice"),
        ({"b\x1b[2J": torch.ones(1)}, r"holds 'b\\x1b\[2J', float32 of shape \[1\]"),
    ],
)
def test_another_tensor_is_refused_with_file_and_remedy(path, changed, said):
    tensor_files.save(_good() | changed, path)
    with pytest.raises(ConfigError, match=rf"x\.safetensors.*{said}.*: train it anew") as error:
        tensor_files.read(path, WANTED, "train it anew")
    assert "\n" not in str(error.value)


def test_a_missing_tensor_is_named(path):
    tensor_files.save({"a": torch.ones(2, 3)}, path)
    with pytest.raises(ConfigError, match=r"x\.safetensors lacks ids: copy the file again"):
        tensor_files.read(path, WANTED)


def test_no_ids_are_ids(path):
    tensor_files.save(_good() | {"ids": torch.zeros(0, dtype=torch.int64)}, path)
    assert not len(tensor_files.read(path, WANTED)["ids"])


def test_what_is_no_file_of_tensors_is_refused_and_a_pipe_is_not_waited_for(path):
    def refused(said: str) -> None:
        with pytest.raises(ConfigError, match=f"is not a readable safetensors file .*{said}"):
            tensor_files.read(path)

    refused("no such file")
    path.write_bytes(b"\x80\x04pickle")
    refused("")
    path.unlink()
    os.mkfifo(path)
    refused("no such file")
    path.unlink()
    path.mkdir()
    refused("no such file")
