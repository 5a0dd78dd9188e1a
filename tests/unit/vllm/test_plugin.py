"""The plugin changes nothing unless asked, refuses early, and says what it did."""

import subprocess
import sys
from dataclasses import make_dataclass
from types import SimpleNamespace

import pytest

from longtail.config.vllm_plugin import VllmSettings
from longtail.errors import ConfigError
from longtail.vllm import patching, plugin
from support.vllm_releases import module, release


@pytest.fixture
def process(monkeypatch):
    """A process with stand-ins of vLLM's front end and worker, and nothing installed."""

    class EngineArgs:
        max_num_seqs = 8

        def __init__(self, additional_config, speculative_config=None, **config):
            self.additional_config = additional_config
            self.speculative_config = speculative_config
            self.config = config

        def create_engine_config(self):
            drafts = self.speculative_config
            return SimpleNamespace(
                additional_config=self.additional_config,
                use_v2_model_runner=not self.config.pop("is_v1", False),
                speculative_config=drafts
                and SimpleNamespace(**{"num_speculative_tokens": 3} | drafts | self.config),
                model_config=SimpleNamespace(runner_type="generate", is_diffusion=False),
                parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1),
                device_config=SimpleNamespace(device_type="cuda"),
            )

    class WorkerBase:
        def __init__(self, vllm_config):
            self.vllm_config = vllm_config

    monkeypatch.delenv("LONGTAIL_VLLM", raising=False)
    monkeypatch.setattr(patching, "vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(plugin, "_PROCESS", plugin._Process())

    class Scheduler:
        pass

    made = SimpleNamespace(EngineArgs=EngineArgs, WorkerBase=WorkerBase)
    paths = (plugin._FRONT_END, EngineArgs), (plugin._WORKER, WorkerBase)
    stats = "vllm.v1.metrics.stats", make_dataclass("SchedulerStats", ["step_counter"])
    for path, kind in (*paths, (plugin._SCHEDULER, Scheduler), stats):
        monkeypatch.setitem(sys.modules, path, module(path, **{kind.__name__: kind}))
    made.modules = release(monkeypatch)
    plugin.register()
    plugin.register()  # vLLM may load a plugin more than once
    return made


def engine(*workers):
    def collective_rpc(name):
        return [getattr(worker, name)() for worker in workers]

    return SimpleNamespace(collective_rpc=collective_rpc)


def test_an_engine_that_does_not_ask_runs_vllms_own_functions(process):
    own = process.modules["rejection_sampler"].rejection_sample
    config = process.EngineArgs({}, {"method": "eagle3"}).create_engine_config()
    worker = process.WorkerBase(config)
    assert config.additional_config == {}
    assert process.modules["rejection_sampler"].rejection_sample is own
    with pytest.raises(ConfigError, match="not active in vLLM's workers"):
        plugin.require(engine(worker))


def test_an_engine_that_asks_gets_the_functions_and_says_so(process):
    own = process.modules["rejection_sampler"].rejection_sample
    given = {"method": "eagle3", "draft_sample_method": "probabilistic"}
    args = process.EngineArgs({"longtail": {}}, {"method": "eagle3"}, **given)
    config = args.create_engine_config()
    assert config.additional_config == {"longtail": VllmSettings().model_dump()}
    assert config.speculative_config.draft_sample_method == "greedy"
    worker = process.WorkerBase(vllm_config=config)
    assert process.modules["rejection_sampler"].rejection_sample is not own
    assert plugin.require(engine(worker)) == [{"runner": "v2"}]


def test_the_variable_reaches_workers_through_the_configuration(process, monkeypatch):
    monkeypatch.setenv("LONGTAIL_VLLM_SPECULATIVE", '{"method": "ngram"}')
    args = process.EngineArgs({}, method="ngram")
    args.create_engine_config()
    assert args.speculative_config is None  # the engine does not ask
    monkeypatch.setenv("LONGTAIL_VLLM", "coupled")
    config = args.create_engine_config()
    assert args.speculative_config == {"method": "ngram"}
    monkeypatch.delenv("LONGTAIL_VLLM")  # a worker on another machine
    plugin.install(config)
    assert plugin._PROCESS.runner == "v2"


def test_what_cannot_be_coupled_is_refused_in_the_front_end(process):
    given = {"rejection_sample_method": "block"}
    args = process.EngineArgs({"longtail": {}}, {"method": "eagle3"}, **given)
    with pytest.raises(ConfigError, match="rejection_sample_method='block'"):
        args.create_engine_config()


def test_one_process_holds_one_choice_of_engines_that_were_not_refused(process):
    asked = {"longtail": {}}
    wrong = SimpleNamespace(rejection_sample_method="block")
    with pytest.raises(ConfigError, match="rejection_sample_method"):
        process.WorkerBase(SimpleNamespace(additional_config=asked, speculative_config=wrong))
    for _ in range(2):
        process.WorkerBase(SimpleNamespace(additional_config=asked, use_v2_model_runner=True))
    assert plugin._PROCESS.runner == "v2"
    with pytest.raises(ConfigError, match="start it in a process of its own"):
        process.WorkerBase(SimpleNamespace(additional_config={}))


def test_a_front_end_imports_nothing_of_the_worker_until_an_engine_asks(process, monkeypatch):
    monkeypatch.delitem(sys.modules, plugin._WORKER)
    plugin.register()
    process.EngineArgs({}).create_engine_config()
    with pytest.raises(ConfigError, match=r"this vLLM has no WorkerBase\.__init__"):
        process.EngineArgs({"longtail": {}}).create_engine_config()


def test_importing_the_plugin_loads_neither_torch_nor_vllm():
    code = (
        "import sys; import longtail.vllm.plugin; "
        "print([m for m in ('torch', 'numpy', 'vllm', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_vllm_is_refused_only_if_the_environment_asks(monkeypatch):
    monkeypatch.setitem(sys.modules, plugin._WORKER, None)
    monkeypatch.delitem(sys.modules, plugin._FRONT_END, raising=False)
    monkeypatch.delenv("LONGTAIL_VLLM", raising=False)
    plugin.register()
    monkeypatch.setenv("LONGTAIL_VLLM", "coupled")
    with pytest.raises(ConfigError, match=r"this vLLM has no WorkerBase\.__init__"):
        plugin.register()


def test_a_learned_drafter_needs_no_speculative_config_and_tolerates_none(process, monkeypatch):
    asked = {"drafter": "learned", "depth": 3}
    with pytest.raises(ConfigError, match=r"remove the argument speculative_config .*'eagle3'"):
        process.EngineArgs({"longtail": asked}, {"method": "eagle3"}).create_engine_config()
    monkeypatch.setenv("LONGTAIL_VLLM_SPECULATIVE", '{"method": "mtp"}')
    with pytest.raises(ConfigError, match=r"remove the variable LONGTAIL_VLLM_SPECULATIVE .*'mtp'"):
        process.EngineArgs({"longtail": asked}).create_engine_config()
    monkeypatch.delenv("LONGTAIL_VLLM_SPECULATIVE")
    args = process.EngineArgs({"longtail": asked}, num_speculative_tokens=3)
    assert args.create_engine_config().additional_config["longtail"]["depth"] == 3
    assert args.speculative_config["num_speculative_tokens"] == 3
    absent = process.EngineArgs({"longtail": asked | {"begin": "absent"}})
    with pytest.raises(ConfigError, match="drafter absent is not a directory"):
        absent.create_engine_config()


def test_the_release_decides_the_runner_and_unknown_ones_are_refused(process, monkeypatch):
    """Before 0.32 a drafter is learned in V1; V2 has graphs for all drafts and for none."""
    for given in (({"drafter": "learned"},), ({}, {"method": "eagle3"})):
        config = process.EngineArgs({"longtail": given[0]}, *given[1:]).create_engine_config()
        depths = {
            row[-1] for row in config.speculative_config.num_speculative_tokens_per_batch_size
        }
        assert depths == {0, config.speculative_config.num_speculative_tokens}
    for version in ("0.23.0", "0.31.0+cpu"):
        monkeypatch.setattr(patching, "vllm_version", lambda version=version: version)
        args = process.EngineArgs({"longtail": {"drafter": "learned"}}, is_v1=True)
        args.create_engine_config()
        assert args.async_scheduling is False
        assert args.speculative_config["method"] == "ngram"
        assert "num_speculative_tokens_per_batch_size" not in args.speculative_config
    monkeypatch.setattr(patching, "vllm_version", lambda: "0.28.0")
    with pytest.raises(ConfigError, match=r"vLLM 0\.28\.0; set VLLM_USE_V2_MODEL_RUNNER=0"):
        process.EngineArgs({"longtail": {}}).create_engine_config()
    for version in ("0.22.1", "0.34.0", "of no distribution"):
        monkeypatch.setattr(patching, "vllm_version", lambda version=version: version)
        with pytest.raises(ConfigError, match=f"this is vLLM {version}; use vLLM 0.23 to 0.33"):
            process.EngineArgs({"longtail": {}}).create_engine_config()
