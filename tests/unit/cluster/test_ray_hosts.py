"""The comparison of a host with the driver's, and the model that it is sent."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("ray")

from longtail.cluster.ray import hosts
from longtail.cluster.ray.hosts import Kit, find, keep, own_kit, read
from longtail.errors import ClusterError


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kit:
    """The kit of a driver, and an empty cache; what is sent comes as it is."""
    monkeypatch.setenv("LONGTAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hosts.ray, "get", lambda sent: sent)
    monkeypatch.setattr(hosts.ray.util, "get_node_ip_address", lambda: "10.0.0.2")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(1000))
    (model / "code.py").write_text("print()")
    return own_kit(model, on_cpu=True)


def test_a_host_with_the_model_uses_it_and_one_without_keeps_what_it_is_sent(kit: Kit) -> None:
    assert find(kit) == kit.directory
    sent = read(kit)
    assert sorted(sent) == ["config.json", "model.safetensors"], "neither code nor pickles"
    shutil.rmtree(kit.directory)
    assert find(kit) is None
    kept = keep(kit, sent)
    assert find(kit) == kept != kit.directory
    (kept / "config.json").write_text("{ }")
    assert find(kit) is None, "a damaged copy is not used"


def test_what_differs_is_named_with_the_host(kit: Kit) -> None:
    other = replace(kit, software={**kit.software, "PyTorch": "1.0"})
    with pytest.raises(ClusterError, match=r"host 10.0.0.2: PyTorch is .*, and 1.0 on the driver"):
        find(other)
    on_gpu = own_kit(kit.directory, on_cpu=False, on_vllm=True)
    assert kit.software.keys() - on_gpu.software.keys() == {"native kernels", "instructions"}
    assert find(on_gpu) == kit.directory
    with pytest.raises(ClusterError, match=r"vLLM is .*, and 0.1 on the driver"):
        find(replace(kit, software={**kit.software, "vLLM": "0.1"}))
    (kit.directory / "model.safetensors").write_bytes(bytes(1001))
    with pytest.raises(ClusterError, match=r"10.0.0.2: model.safetensors is .* copy .*model to"):
        find(kit)


def test_what_arrives_damaged_is_refused_and_not_kept(kit: Kit) -> None:
    sent = read(kit)
    sent["model.safetensors"] = sent["model.safetensors"] + 1
    shutil.rmtree(kit.directory)
    with pytest.raises(ClusterError, match="start again"):
        keep(kit, sent)
    assert find(kit) is None
