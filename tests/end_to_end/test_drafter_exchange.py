"""Drafters change hands: exported, imported, taken from one run to the next."""

import json

import pytest

from end_to_end.workshop import Said, Workshop, build, save_untaught, say
from longtail.assembly.drafters import Target, drafter_names, open_drafter
from longtail.drafter.formats.checkpoint import TrainingRecord, is_drafter
from longtail.model.hf.model import load_model
from longtail.model.hf.tokenizer import load_tokenizer

DRAFTED = ("--speculation.tuner=fixed", "--speculation.depth=3", "--run.steps=2")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Holds `drafter`, an EAGLE-3 drafter that claims more than it can, and `first`, a run."""
    shop = build(tmp_path_factory.mktemp("exchange"))
    record = TrainingRecord(steps=7, tokens=99, unroll_steps=2, overlap=(0.9,), accept_len=5.0)
    path = save_untaught(shop.model, shop.path / "drafter", "eagle3", record)
    said = shop.train("first", f"--speculation.drafter={path}", *DRAFTED)
    assert said.code == 0, said.err
    return shop


def export(shop: Workshop, out: str, drafter: str, *more: str) -> Said:
    words = ("drafter", "export", str(shop.path / drafter), "--out", str(shop.path / out))
    return say(*words, *more)


@pytest.mark.parametrize("drafter", ["first", "first/drafter/step_000002", "drafter"])
def test_a_drafter_is_exported_for_its_own_target_or_a_given_one(workshop, drafter):
    out = f"out-{drafter.replace('/', '-')}"
    more = ("--target", str(workshop.model)) if drafter == "drafter" else ()
    said = export(workshop, out, drafter, *more)
    assert said.code == 0, said.err
    target = str(workshop.model) if more else "first/checkpoints/step_000002/policy"
    assert f'{target} --speculative-config \'{{"method": "eagle3"' in said.out
    names = sorted(each.name for each in (workshop.path / out).iterdir())
    assert names == ["config.json", "model.safetensors"]


def test_what_cannot_be_exported_leaves_nothing_behind(workshop):
    before = sorted(path.name for path in workshop.path.iterdir())
    more = ("--target", str(workshop.model))
    said = export(workshop, "drafter", "drafter", *more)
    assert said.code == 2
    assert "exists; remove it" in said.err
    assert "no weights to export" in say("drafter", "export", "history", "--out=x", *more).err
    assert sorted(path.name for path in workshop.path.iterdir()) == before


def test_prompts_are_those_that_the_drafters_run_held_out_or_given_ones(workshop):
    words = ("--n=2", "--max-tokens=8", "--temperatures=0", "--json")
    said = say("drafter", "eval", str(workshop.path / "first"), *words)
    assert said.code == 0, said.err
    assert json.loads(said.out)["target"] == str(workshop.path / "first")
    more = (str(workshop.path / "drafter"), "--target", str(workshop.model), *words)
    said = say("drafter", "eval", *more)
    assert said.code == 2
    assert "--prompts is needed" in said.err
    said = say("drafter", "eval", *more, "--prompts", str(workshop.prompts), "--n=0")
    assert "--n = 0: it must be greater than or equal to 1" in said.err
    said = say("drafter", "eval", *more, "--prompts", str(workshop.prompts))
    assert all(each["differing_share"] == 0 for each in json.loads(said.out)["measured"])


def test_an_exported_drafter_is_imported_and_opens_by_either_name(workshop):
    assert export(workshop, "away", "drafter", "--target", str(workshop.model)).code == 0
    words = ("--target", str(workshop.model), "--out", str(workshop.path / "back"))
    said = say("drafter", "import", str(workshop.path / "away"), *words)
    assert said.code == 0, said.err
    assert is_drafter(workshop.path / "back")
    assert "the inputs of layers [0, 1]; window 16" in said.out
    target = _target(workshop, str(workshop.model))
    for name in ("away", "back", "drafter", "first", "first/drafter/step_000002"):
        drafter = open_drafter(str(workshop.path / name), target)
        assert drafter.taps.layers == (0, 1)
    said = say("drafter", "import", str(workshop.model), *words[:3], str(workshop.path / "no"))
    assert said.code == 2
    assert "holds no published drafter" in said.err


def _target(shop: Workshop, name: str) -> Target:
    model, tokenizer = load_model(shop.model), load_tokenizer(shop.model)
    return Target(model=model, tokenizer=tokenizer, directory=shop.model, name=name)


def test_auto_is_the_runs_own_drafter_for_its_policy_and_checkpoints(workshop):
    run = workshop.path / "first"
    for name in (run, workshop.policy("first", 2).parent):
        mine = _target(workshop, str(name))
        names = drafter_names("auto", mine.name, learns=True)
        drafter, *others = (open_drafter(name, mine) for name in names)
        assert drafter.taps.layers == (0, 1)
        assert names[1:] == ["history", "phrases"]
        assert not any(each.taps.any for each in others)
    words = ("--prompt", "say 3", "--max-tokens", "12", "--temperature", "0", "--threads", "1")
    said = say("generate", str(run), *words)
    assert said.code == 0, said.err
    assert say("generate", str(run), *words, "--drafter", "none").out == said.out


def test_training_goes_on_from_a_drafter_of_any_form(workshop):
    words = (
        *("drafter", "train", f"--target.path={workshop.model}"),
        f"--data.source={workshop.prompts}",
        *("--data.size=12", "--data.heldout_size=4", "--data.max_tokens=24"),
        *("--train.batch_tokens=100", "--train.steps=2", "--run.threads=1", "--run.device=cpu"),
        f"--drafter.init={workshop.path / 'first'}",
    )
    said = say(*words, f"--run.dir={workshop.path / 'gone-on'}")
    assert said.code == 0, said.err
    path = workshop.path / "gone-on" / "checkpoints" / "step_000002" / "policy"
    described = json.loads((path / "drafter.json").read_text())
    assert (described["window"], described["layers"]) == (16, [0, 1])
    said = say(*words, "--drafter.window=8", f"--run.dir={workshop.path / 'not'}")
    assert said.code == 2
    assert "drafter.window: drafter.init brings its own" in said.err
    said = say(*words[:-1], "--drafter.init=history", f"--run.dir={workshop.path / 'not'}")
    assert said.code == 2
    assert "no layer to train" in said.err
