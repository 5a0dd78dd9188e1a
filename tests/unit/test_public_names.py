"""The public surface: the names of `import longtail`, and what `Engine` promises."""

import ast
import inspect
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import longtail
from longtail import Completion, Engine, SamplingParams
from longtail.api import PromptInput
from longtail.errors import ConfigError, RequestError

NAMES = (
    "Completion", "Engine", "LongtailError", "Prompt", "Request", "Rollout", "RunConfig",
    "SamplingParams", "TextStream", "__version__", "dr_grpo", "load_drafter", "load_tokenizer",
    "noise_key", "open_workers", "pack_rollouts", "train",
)  # fmt: skip


def test_the_package_offers_these_names_and_no_others() -> None:
    assert tuple(longtail.__all__) == NAMES
    assert tuple(dir(longtail)) == NAMES
    with pytest.raises(AttributeError, match="no attribute 'Trainer2'"):
        longtail.Trainer2  # noqa: B018


@pytest.mark.parametrize("name", [name for name in NAMES if name != "__version__"])
def test_a_public_name_is_importable_documented_and_visible_to_type_checkers(name: str) -> None:
    assert inspect.getdoc(getattr(longtail, name))
    tree = ast.parse(Path(longtail.__file__).read_text(encoding="utf-8"))
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    assert name in imported


def test_importing_the_package_imports_no_torch() -> None:
    script = "import sys, longtail; longtail.RunConfig; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_completions_depend_on_prompt_seed_and_index_alone(model_path: Path) -> None:
    engine = Engine(str(model_path))
    params = SamplingParams(max_tokens=8)
    both = engine.generate(["1+1=", "2*3="], params, n=2, seed=7)
    assert [type(each) for each in both] == [Completion] * 4
    alone = Engine(str(model_path), drafter="none").generate(["2*3="], params, n=2, seed=7)
    assert [each.text for each in alone] == [each.text for each in both[2:]]
    assert both[0].text != both[1].text


def test_a_stream_yields_the_text_of_its_completion(model_path: Path) -> None:
    engine, params = Engine(str(model_path)), SamplingParams(max_tokens=20)
    stream = engine.stream("1+1=", params, seed=3)
    text = "".join(piece.text for piece in stream)
    assert stream.completion is not None
    assert text == stream.completion.text == engine.generate(["1+1="], params, seed=3)[0].text


def test_calls_in_turns_and_in_threads_get_the_texts_that_they_get_alone(model_path: Path) -> None:
    """The second stream used to get the tokens of the first one's id, or those of no step."""
    engine, params = Engine(str(model_path), drafter="history"), SamplingParams(max_tokens=30)
    alone = [engine.generate(["1+1="], params, seed=seed)[0].tokens for seed in range(4)]
    left = engine.stream("1+1=", params, seed=9)
    next(iter(left))
    pair = [engine.stream("1+1=", params, seed=seed) for seed in (0, 1)]
    for _ in zip(*pair, strict=False):
        pass
    with ThreadPoolExecutor(2) as threads:  # two prompts: the engine is replaced by a larger one
        calls = [
            threads.submit(engine.generate, ["1+1=", "2"], params, seed=seed) for seed in (2, 3)
        ]
    for each in pair:  # the longer one is read on
        list(each)
    found = [each.completion for each in pair] + [each.result()[0] for each in calls]
    assert [each and each.tokens for each in found] == alone
    with left:
        pass
    assert list(left) == []
    assert left.completion is None


@pytest.mark.many_steps  # types would be checked before the engine does
@pytest.mark.parametrize("prompts", [None, 5, [1, 2], {"role": "user", "content": "hi"}, [["hi"]]])
def test_what_is_no_prompt_is_refused_by_its_value(model_path: Path, prompts: PromptInput) -> None:
    with pytest.raises(RequestError, match=r"a prompt is .*: it must be a text, or a list"):
        Engine(str(model_path)).generate(prompts)


@pytest.mark.parametrize("prompts", ["1+1=", [{"role": "user", "content": "hi"}]])
def test_a_text_or_a_chat_alone_is_one_prompt(model_path: Path, prompts: PromptInput) -> None:
    engine, params = Engine(str(model_path), drafter="none"), SamplingParams(max_tokens=4)
    (one,), (same,) = engine.generate(prompts, params), engine.generate([prompts], params)
    assert one.tokens == same.tokens


def test_what_does_not_fit_into_the_model_is_refused_before_any_work(model_path: Path) -> None:
    engine = Engine(str(model_path))
    with pytest.raises(RequestError, match="max_tokens = 512: after a prompt of"):
        engine.generate(["1", "2"], SamplingParams(max_tokens=512))
    with pytest.raises(ConfigError, match="'nowhere': no such directory"):
        Engine("nowhere")


def test_a_drafter_without_weights_cannot_be_loaded(model_path: Path) -> None:
    with pytest.raises(ConfigError, match="'history': this drafter has no weights"):
        longtail.load_drafter("history", str(model_path))
