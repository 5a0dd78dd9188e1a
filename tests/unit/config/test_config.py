import os
import re
import tomllib
import typing
from pathlib import Path

import pytest

from longtail.config import files as configfile
from longtail.config.drafter import DrafterTrainConfig
from longtail.config.rl import RunConfig, load
from longtail.config.sft import SftConfig
from longtail.errors import ConfigError
from longtail.system.device import set_threads


def _refusal(*words: str, toml: str | None = None, at: Path = Path("unused")) -> str:
    path = None
    if toml is not None:
        path = at / "run.toml"
        path.write_text(toml)
    with pytest.raises(ConfigError) as caught:
        load(path, words)
    return str(caught.value)


def test_the_command_line_overlays_the_file_and_the_file_the_defaults(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[run]\nsteps = 7\nseed = 3\n[learner]\nloss = "dapo"\n')
    config = load(file, ["--run.steps", "9", "--learner.learning_rate=1e-4"])
    assert (config.run.steps, config.run.seed) == (9, 3)
    assert (config.learner.loss, config.learner.learning_rate) == ("dapo", 1e-4)
    assert config.rollout == RunConfig().rollout


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--run.resume", "false"], ("run", "resume"), False),
        (["--learner.betas", "0.8,0.99"], ("learner", "betas"), (0.8, 0.99)),
        (["--learner.betas=[0.8, 0.99]"], ("learner", "betas"), (0.8, 0.99)),
        (["--rollout.stop", '["a,b", "c"]'], ("rollout", "stop"), ("a,b", "c")),
        (["--rollout.stop="], ("rollout", "stop"), ()),
        (["--rollout.stop=a", "--rollout.stop=b"], ("rollout", "stop"), ("a", "b")),
        (["--rollout.stop", r'["\n"]'], ("rollout", "stop"), ("\n",)),
        (["--run.writers", "tensorboard"], ("run", "writers"), ("tensorboard",)),
        (["--learner.clip_low", "none"], ("learner", "clip_low"), None),
        (["--data.source=a=b.jsonl"], ("data", "source"), "a=b.jsonl"),
        (
            ["--data.chat_template_kwargs={a = false, b.c = [1, 'x']}"],
            ("data", "chat_template_kwargs"),
            {"a": False, "b": {"c": [1, "x"]}},
        ),
        (
            ["--data.chat_template_kwargs", '{"a": {"b": 0.5}}'],
            ("data", "chat_template_kwargs"),
            {"a": {"b": 0.5}},
        ),
        (["--data.chat_template_kwargs=none"], ("data", "chat_template_kwargs"), None),
        (["--run.steps", "1", "--run.steps", "2"], ("run", "steps"), 2),
    ],
)
def test_an_option_is_parsed_as_the_type_of_its_field(words, field, value):
    section, key = field
    assert load(None, words).model_dump()[section][key] == value


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("--learner.learning_rte=1", "learner.learning_rate"),
        ("--learner.group_size=4", "rollout.group_size"),
        ("--steps=4", "run.steps"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(word, nearest):
    message = _refusal(word)
    assert f"{word} (did you mean --{nearest}?)" in message


def test_unknown_keys_of_a_file_are_refused_by_their_dotted_name(tmp_path):
    message = _refusal(toml="[learner]\nlearning_rte = 1\n[runn]\nx = 1\n", at=tmp_path)
    assert "learner.learning_rte: unknown key (did you mean learner" in message
    assert "runn: unknown key (did you mean run" in message
    assert "[model] has path" in _refusal(toml="[model]\nzzzzzz = 4", at=tmp_path)
    assert "the sections are model, data," in _refusal(toml="[qqqqqq]", at=tmp_path)


@pytest.mark.parametrize(
    ("toml", "line"),
    [
        ('[run]\nsteps = "x"', 'run.steps = "x": it must be a valid integer'),
        ("[run]\nsteps = 0", "run.steps = 0: it must be greater than or equal to 1"),
        ('[rollout]\nengine = "trt"', "rollout.engine = \"trt\": it must be 'auto', 'own'"),
        ("[learner]\nbetas = [0.9, 1.5]", "learner.betas[1] = 1.5: it must be less than 1"),
        ("[learner]\nlearning_rate = inf", "learner.learning_rate = Infinity: it must be a finite"),
        ("learner = 3", "learner = 3: it must be a section; write [learner]"),
        ('[rollout]\nstop = [""]', "rollout.stop[0]"),
        ("[run]\nseed = 2024-01-01", "run.seed"),
    ],
)
def test_a_wrong_value_is_refused_with_field_value_and_expected_type(tmp_path, toml, line):
    assert line in _refusal(toml=toml, at=tmp_path)


def test_a_wrong_option_is_refused_with_field_value_and_expected_type():
    assert "--run.steps = 1.5: it must be a valid integer" in _refusal("--run.steps", "1.5")
    for text in ("thinking", '{"a": null}', "[1]"):
        assert "data.chat_template_kwargs" in _refusal("--data.chat_template_kwargs", text)
    assert "--run.resume = maybe: it must be a valid boolean" in _refusal("--run.resume=maybe")
    assert "argument --run.steps: expected one argument" in _refusal("--run.steps")
    assert "unrecognized arguments: oops" in _refusal("oops")
    assert "--learner.learning_rate = " in _refusal("--learner.learning_rate", "inf")


@pytest.mark.parametrize("model", [RunConfig, SftConfig, DrafterTrainConfig])
def test_no_truth_value_is_a_number(model):
    kinds = r"<class '(int|float)|tuple\[typing.Annotated\[(int|float)"
    for name, info in configfile.fields_of(model).items():
        if re.match(kinds, kind := str(info.annotation)):
            value = "[true, true]" if "tuple" in kind else "true"
            with pytest.raises(ConfigError, match=f"{name}.* it must be a number"):
                configfile.merged(model, None, tomllib.loads(f"{name} = {value}"))


def test_a_switch_is_written_as_in_toml_and_as_in_python():
    for word, value in {"true": True, "False": False, "auto": "auto"}.items():
        assert load(None, [f"--learner.autocast={word}"]).learner.autocast == value


@pytest.mark.parametrize("model", [RunConfig, SftConfig, DrafterTrainConfig])
def test_every_integer_field_has_an_upper_bound(model):
    for name, info in configfile.fields_of(model).items():
        kinds = {info.annotation, *typing.get_args(info.annotation)}
        if int in kinds and bool not in kinds:
            with pytest.raises(ConfigError, match=name):
                configfile.resolve(model, None, [f"--{name}={2**63}"])


@pytest.mark.parametrize(
    ("word", "bound"),
    [
        ("--run.threads=100000", "1024"),
        ("--reward.timeout_s=1e300", "1000000"),
        ("--reward.timeout_s=1e-9", "0.1"),
        ("--rollout.max_running=1000000", "65536"),
        ("--rollout.prompts_per_step=1000000", "the most is 1000000"),
        ("--data.size=1000000000000", "10000000"),
        ("--run.device=cuda:99999999999999999999", "pattern"),
        ("--run.dir=a\0b", "pattern"),
        ("--cluster.address=\ud83d", "a valid string"),
        ("--cluster.gpus_per_worker=1e-9", "0.0001"),
        ("--rollout.temperature=1e-9", "0.001"),
        ("--learner.eps=1e-320", "0.000"),
    ],
)
def test_a_value_beyond_its_bound_is_refused_with_the_bound(word, bound):
    message = _refusal(word)
    assert word.removeprefix("--").partition("=")[0] in message
    assert bound in message


@pytest.mark.parametrize("threads", [-1, 100_000])
def test_a_number_of_threads_out_of_range_is_refused(threads):
    with pytest.raises(ConfigError, match=f"threads = {threads}: it must be from 0"):
        set_threads(threads)


@pytest.mark.parametrize(
    ("text", "place"),
    [("[" * 20_000, ""), ("{a=" * 20_000, ""), ("9" * 20_000, ""), ("= 3\n", "line 2")],
    ids=["brackets", "tables", "digits", "signs"],
)
def test_malformed_toml_names_file_and_line(tmp_path, text, place):
    message = _refusal(toml=f"[run]\nsteps = {text}", at=tmp_path)
    assert "run.toml: not valid TOML" in message
    assert place in message


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--rollout.temperature=0"], ["rollout.temperature = 0"]),
        (["--rollout.kv_tokens=100"], ["rollout.kv_tokens = 100", "2560"]),
        (["--learner.mini_batches=129"], ["learner.mini_batches = 129", "128"]),
        (["--reward.name=environment"], ["reward.name = 'environment': no environment gives it"]),
        (["--learner.loss=ppo"], ["learner.loss = 'ppo'", "grpo, dr_grpo", "module:function"]),
        (["--learner.advantage=x"], ["learner.advantage = 'x': it must be grpo, dr_grpo, rloo"]),
        (
            ["--rollout.kv_tokens=100", "--learner.overlong_buffer=9999"],
            ["2 problems", "rollout.kv_tokens = 100", "learner.overlong_buffer = 9999"],
        ),
        (["--learner.autocast=true", "--learner.dtype=float64"], ["learner.autocast"]),
        (
            ["--data.source=reasoning_gym:leg_counting", "--data.heldout_size=2048"],
            ["data.heldout_size = 2048", "data.size"],
        ),
    ],
)
def test_contradicting_fields_are_refused_by_name(words, names):
    message = _refusal(*words)
    assert all(name in message for name in names), message


def test_values_at_the_limits_are_accepted():
    load(None, ["--rollout.kv_tokens=2560", "--learner.mini_batches=128"])
    load(None, ["--learner.overlong_buffer=2047", "--data.heldout_size=2048"])
    load(None, ["--data.source=reasoning_gym:leg_counting", "--data.heldout_size=2047"])


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path):
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe\x00")
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (Path("no/such.toml"), r"no/such\.toml: no such file.*quickstart"),
        (tmp_path / "run.toml", r"run\.toml: not UTF-8"),
        (tmp_path, "cannot be read"),
        (tmp_path / "pipe", "cannot be read: it is not a file"),
        (Path("/dev/zero"), "cannot be read: it is not a file"),
        (configfile.locate("x" * 5000), "cannot be read: File name too long"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(path)


def test_a_dumped_configuration_loads_to_an_equal_one(tmp_path):
    words = [
        "--learner.clip_high=0.28",
        '--rollout.stop=["a\\"b\\n", "c"]',
        """--data.chat_template_kwargs={"a b" = [{}, {c = 1e300}], d = {e = "\\n'"}, "" = 10}""",
        "--run.seed=12345678901",
    ]
    for config in (load(None, words), SftConfig()):
        file = tmp_path / "config.toml"
        file.write_text(configfile.render(config))
        assert configfile.resolve(type(config), file, []) == config


def test_problems_of_reasoning_gym_are_scored_by_their_task_unless_a_reward_is_named():
    gym = "--data.source=reasoning_gym:gcd"
    assert load(None, [gym]).reward.name == "reasoning_gym"
    assert load(None, [gym, "--reward.timeout_s=3"]).reward.name == "reasoning_gym"
    assert load(None, [gym, "--reward.name=last_number"]).reward.name == "last_number"
    assert load(None).reward.name == "last_number"


def test_only_functions_compare_the_completions_of_a_group():
    words = ["--reward.per=group", "--reward.name=my_rewards:rank"]
    assert load(None, words).reward.per == "group"
    assert "reward.name = 'exact' grades each completion by itself" in _refusal(
        "--reward.per=group", "--reward.name=exact"
    )


@pytest.mark.parametrize("name", configfile.recipes())
def test_every_recipe_loads_and_that_of_sft_makes_the_model_of_the_run(name):
    config = load(configfile.locate(name))
    assert config.run.dir == f"runs/{name}"
    if name in configfile.recipes("sft"):
        start = configfile.resolve(SftConfig, configfile.locate(name, "sft"), ())
        assert config.model.path == start.run.dir
