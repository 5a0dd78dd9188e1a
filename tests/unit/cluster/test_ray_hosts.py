"""The comparison of a host with the driver's, and the directories that it is sent."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("ray")

from longtail.cluster.workers.processes import Place
from longtail.cluster.workers.ray import host_checks
from longtail.cluster.workers.ray.host_checks import Kit, find, keep, own_kit, read
from longtail.errors import ClusterError


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kit:
    """The kit of a driver, and an empty cache; what is sent comes as it is."""
    monkeypatch.setenv("LONGTAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(host_checks.ray, "get", lambda sent: sent)
    monkeypatch.setattr(host_checks.ray.util, "get_node_ip_address", lambda: "10.0.0.2")
    model, drafter = tmp_path / "model", tmp_path / "drafter"
    for folder in (model, drafter / "initial"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(1000))
        (folder / "code.py").write_text("print()")
    return own_kit([model, drafter], on_cpu=True)


def test_a_host_uses_the_directories_that_it_has_and_keeps_those_that_it_is_sent(kit: Kit) -> None:
    model, drafter = kit.folders
    assert find(kit) == {model: model, drafter: drafter}
    sent = read(drafter, kit.folders[drafter])
    wanted = ["initial/config.json", "initial/model.safetensors"]
    assert sorted(sent) == wanted, "neither code nor pickles"
    shutil.rmtree(drafter)
    assert find(kit) == {model: model}
    kept = keep(kit.folders[drafter], sent)
    assert find(kit) == {model: model, drafter: kept}
    place = Place(found=find(kit))
    assert place.local(drafter / "initial") == kept / "initial"
    assert place.local(model) == model
    assert place.local(Path("history")) == Path("history")
    (kept / "initial/config.json").write_text("{ }")
    assert find(kit) == {model: model}, "a damaged copy is not used"


def test_what_differs_is_named_with_the_host(kit: Kit) -> None:
    other = replace(kit, software={**kit.software, "PyTorch": "1.0"})
    with pytest.raises(ClusterError, match=r"host 10.0.0.2: PyTorch is .*, and 1.0 on the driver"):
        find(other)
    model, drafter = kit.folders
    on_gpu = own_kit([model], on_cpu=False, on_vllm=True)
    assert kit.software.keys() - on_gpu.software.keys() == {"native kernels", "instructions"}
    assert find(on_gpu) == {model: model}
    with pytest.raises(ClusterError, match=r"vLLM is .*, and 0.1 on the driver"):
        find(replace(kit, software={**kit.software, "vLLM": "0.1"}))
    (drafter / "initial/model.safetensors").write_bytes(bytes(1001))
    what = r"10.0.0.2: initial/model.safetensors is .* copy .*/drafter to"
    with pytest.raises(ClusterError, match=what):
        find(kit)


def test_what_arrives_damaged_is_refused_and_not_kept(kit: Kit) -> None:
    model, _ = kit.folders
    sent = read(model, kit.folders[model])
    sent["model.safetensors"] = sent["model.safetensors"] + 1
    shutil.rmtree(model)
    with pytest.raises(ClusterError, match="start again"):
        keep(kit.folders[model], sent)
    assert model not in find(kit)
