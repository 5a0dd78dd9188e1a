"""Laws of coupled drafts in a real vLLM that runs its V1 model runner on the CPU."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from longtail.assembly.drafters import read_drafter
from longtail.config.command_options import EvalOptions
from longtail.drafter.formats.checkpoint import LoadedDrafter, load_unbound
from longtail.drafter.formats.eagle_export import write_layout
from longtail.drafter.ridge.layer import RidgeConfig, RidgeLayer
from longtail.drafter.ridge.trainer import RidgeTrainer, as_eagle
from longtail.programs.drafter_eval import complete, find_prompts, open_target
from longtail.rl.data.examples import Example
from longtail.rl.packing import pack_sequences
from longtail.sampling import noise_key
from longtail.types import SamplingParams
from support import toy
from vllm_wheel.runs import NEEDS_VLLM, play_scenes

pytestmark = NEEDS_VLLM
_NUM_PROMPTS = 14
DRAFTING = ("ridge", "draft_model", "cramped", "mtp")
LEARNING = ("learned", "updated", "ranks", "launched")
MTP = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Play all scenes once."""
    root = tmp_path_factory.mktemp("wheel")
    asked = EvalOptions(
        target=str(toy.REASONER), drafter="history", prompts=str(toy.PROBLEMS), dtype="float32",
        n=_NUM_PROMPTS, max_tokens=48, seed=0,
    )  # fmt: skip
    target = open_target(asked)
    prompts = find_prompts(asked, target)
    eagle3 = read_drafter(str(toy.DRAFTERS["eagle3"]), target, torch.float32)
    assert eagle3 is not None
    losing = eagle3.copied()
    losing.layer.norm.weight.data.neg_()
    drafters = {"eagle3": eagle3, "losing": losing, "ridge": _ridge(prompts, asked)}
    for name, loaded in drafters.items():
        _write(root / name, loaded, target)
    (root / "mtp").mkdir()
    shape = json.loads((target.directory / "config.json").read_text())
    (root / "mtp/config.json").write_text(json.dumps(shape | MTP))
    job: dict[str, Any] = {name: str(root / name) for name in (*drafters, "mtp", "saved")}
    job |= {"target": str(target.directory)}
    seeds = [noise_key(0, "drafter eval", index) for index in range(_NUM_PROMPTS)]
    job |= {"prompts": prompts, "seeds": seeds, "runner": "v1", "turns": 5}
    scenes = (("plain", "eagle3", "losing", *DRAFTING), LEARNING)
    with ThreadPoolExecutor() as side_by_side:
        one, other = side_by_side.map(lambda own: play_scenes(job | {"scenes": own}), scenes)
    return one | other


def _ridge(prompts: Sequence[tuple[int, ...]], asked: EvalOptions) -> LoadedDrafter:
    """Return the ridge drafter of texts after these prompts."""
    target, written = open_target(asked), open_target(asked)
    done = complete(written, prompts, SamplingParams(max_tokens=48), None)[0]
    texts = [
        Example(tokens=(*prompt, *each.tokens), prompt_len=len(prompt))
        for prompt, each in zip(prompts, done, strict=True)
    ]
    trainer = RidgeTrainer(RidgeLayer(RidgeConfig(target=target.model.config)), target.model)
    trainer.step(list(pack_sequences(texts, 1024)))
    eagle = read_drafter(str(toy.DRAFTERS["eagle1"]), target, torch.float32)
    assert eagle is not None
    return replace(eagle, layer=as_eagle(trainer.layer), draft_ids=None)


def _write(path: Path, loaded: Any, target: Any) -> None:
    loaded = loaded.copied()
    loaded.layer.fold()
    write_layout(path, loaded, target.model)


@pytest.mark.parametrize("scene", DRAFTING)
def test_texts_do_not_depend_on_drafts(played: dict[str, Any], scene: str) -> None:
    plain = played[scene].get("plain", played["plain"]["tokens"])
    assert played[scene]["tokens"] == plain
    assert played[scene]["metrics"]["vllm:spec_decode_num_accepted_tokens"] > 0
    assert scene != "cramped" or played[scene]["metrics"]["vllm:num_preemptions"] > 0


def test_texts_do_not_depend_on_order_or_the_prefix_cache(played: dict[str, Any]) -> None:
    for turn in played["eagle3"]:
        assert turn["tokens"] == played["plain"]["tokens"]


def grown(earlier: dict[str, Any], later: dict[str, Any], of: str, by: str) -> float:
    """Return the growth of one of vLLM's counters of drafts over that of another."""
    one, other = (
        later["metrics"][name] - earlier.get("metrics", {}).get(name, 0.0)
        for name in (f"vllm:spec_decode_num_{of}", f"vllm:spec_decode_num_{by}")
    )
    return one / other


def accept_length(earlier: dict[str, Any], later: dict[str, Any]) -> float:
    """Tokens per verification step between two readings of vLLM's counters."""
    return 1 + grown(earlier, later, "accepted_tokens", "drafts")


def accepted_share(earlier: dict[str, Any], later: dict[str, Any]) -> float:
    """Accepted share of the drafted tokens, whatever depths the seconds of steps led to."""
    return grown(earlier, later, "accepted_tokens", "draft_tokens")


def test_a_drafter_that_loses_hardly_drafts(played: dict[str, Any]) -> None:
    assert [each["tokens"] for each in played["losing"]["turns"]] == 3 * [played["plain"]["tokens"]]
    shown = played["losing"]["shown"]
    assert shown["longtail:steps_drafted"] > 0
    if played["losing"]["chosen"]:  # not before 0.29 on a CPU
        assert shown["longtail:steps_drafted"] < 0.3 * shown["longtail:steps_plain"]
        assert shown["longtail:seconds_saved"] < 0


def test_vllm_reads_the_exported_ridge_drafter_rightly(played: dict[str, Any]) -> None:
    """A layout that is read wrongly, by a layer or a position, drafts almost nothing right."""
    assert accept_length({}, played["ridge"]) > 1.5


def test_vllm_learns_a_drafter_from_nothing(played: dict[str, Any]) -> None:
    learned = played["learned"]
    for turn in (*learned["turns"], learned["renewed"]):
        assert turn["tokens"] == played["plain"]["tokens"]
    assert learned["turns"][-1]["metrics"]["vllm:num_preemptions"] > 0
    assert accepted_share(learned["turns"][-2], learned["turns"][-1]) > 0.5
    status = learned["status"]["learned"]
    assert status["tokens"] > 1000
    assert status["accept_length"] > 1.2
    saved = load_unbound(Path(learned["saved"]))
    assert isinstance(saved.layer, RidgeLayer)
    assert saved.sums["counts"].sum() > 0


def test_weights_that_change_in_place_are_noticed(played: dict[str, Any]) -> None:
    """And where they are as before nothing is lost."""
    updated = played["updated"]
    assert updated["texts"] == updated["plain"] != played["plain"]["tokens"]
    first, before, after, later = updated["tokens"]
    assert first <= before > after <= later


def test_ranks_learn_the_same_drafter(played: dict[str, Any]) -> None:
    ranks = played["ranks"]
    assert ranks["turns"] == [played["plain"]["tokens"]] * 3
    first, second = (each["learned"] for each in ranks["status"])
    assert first == second
    assert first["solves"] > 1
    assert ranks["changed"]["tokens"] == played["updated"]["plain"]
    fewer, others = (each["learned"] for each in ranks["after"])
    assert fewer == others
    assert fewer["tokens"] < first["tokens"]


def test_ranks_that_torchrun_starts_agree_whatever_their_clocks_say(played: dict[str, Any]) -> None:
    first, second = played["launched"]
    assert first["turns"] == second["turns"] == [played["plain"]["tokens"]] * 3
    assert first["depths"] == second["depths"]
    assert len(set(first["depths"])) > 1
