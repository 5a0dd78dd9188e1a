"""vLLM as a `Generator`: an `LLMEngine` in this process, stepped by longtail.

    submit          add_request, the noise key as its seed: the plugin draws our very texts
    step            LLMEngine.step --> tokens, verified drafts, seconds
    load_policy     weights in place, between two rollouts; the prefix cache is dropped
    load_drafter    weights in place, between two steps

Texts, stop strings and logprobs are kept here; `depths` chooses in vLLM's scheduler how many tokens
are drafted. It has not run on a GPU yet.
"""

import math
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from longtail.drafter.weights import are_finite
from longtail.engine.batch import Results
from longtail.engine.request import ActiveRequests, EngineLimits
from longtail.engine.text import Decode
from longtail.errors import NonFiniteError
from longtail.generator import StepReport, Switch, Verified
from longtail.types import Request, SamplingParams
from longtail.vllm import plugin
from longtail.vllm.depths import Depths
from longtail.vllm.learned_worker import save_if_learned
from longtail.vllm.patching import reloading
from longtail.vllm.reload import load_drafter, load_policy
from longtail.vllm.run_drafter import VllmDrafter
from longtail.vllm.start import start

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler is in this process
    "VLLM_NO_USAGE_STATS": "1",
}
_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # vLLM's groups are of this machine; without it they listen on its address.
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
}


@final
class VllmGenerator(ActiveRequests):
    """Generates with vLLM from the model in `directory`, in `dtype`.

    `options` are further arguments of vLLM's engine. Raises ConfigError if vLLM cannot run them.
    """

    def __init__(
        self,
        directory: Path,
        decode: Decode,
        limits: EngineLimits,
        *,
        dtype: torch.dtype,
        drafter: VllmDrafter | None = None,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__()
        os.environ.update(_ENVIRONMENT)
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        import vllm.engine.arg_utils  # noqa: F401 - hooks need it

        plugin.register()
        self._decode, self._limits = decode, limits
        self._engine = start(directory, limits, dtype, drafter, options)
        plugin.require(self._engine)
        reloading()  # refuses a vLLM that cannot take new weights, before the first text
        self._vocab_size = int(self._engine.model_config.get_vocab_size())
        self._depths: Depths = self._scheduler.longtail_depths
        if drafter is not None:
            self._depths.use(drafter.tuner)
        self._by_vllms_names = None if drafter is None else drafter.tensors
        self._names: dict[str, str] = {}
        """Our id of each request by vLLM's, which is longer."""

    def check(self, request: Request) -> None:
        """Raise RequestError if vLLM can never serve the request; thread-safe."""
        self._check(request, self._vocab_size, self._limits.max_len)

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self.check(request)
        self._wake()
        prompt = {"prompt_token_ids": [*request.prompt_tokens]}
        params = _params(request.sampling, request.noise_key)
        name = self._engine.add_request(request.request_id, prompt, params)
        self._names[name] = request.request_id
        self._begin(request)

    def abort(self, request_id: str) -> None:
        """Remove an unfinished request."""
        self._in_progress(request_id)
        self._engine.abort_request([request_id])
        self._forget(request_id)

    def step(self) -> StepReport:
        """Take one step of vLLM's scheduler."""
        depths, began = self._depths, time.perf_counter()
        drafted, depths.taken = bool(depths.depth), None
        outputs = self._engine.step()
        counts, drafts = dict[str, int](), dict[str, int]()
        if depths.taken is not None:
            counts = depths.taken.num_scheduled_tokens
            lists = depths.taken.scheduled_spec_decode_tokens
            drafts = {self._names.get(name, name): len(each) for name, each in lists.items()}
        results, verified = Results(), list[Verified]()
        for output in outputs:
            if output.request_id in self._active:  # else it has ended here already
                verified += self._append(output, drafts.get(output.request_id, 0), results)
        switch = None
        if drafted != bool(depths.depth):
            reason = f"{len(counts)} running, measured in vLLM's steps"
            switch = Switch(drafts=not drafted, reason=reason)
        return StepReport(
            num_tokens=sum(counts.values()),
            num_running=len(counts),
            step_s=time.perf_counter() - began,
            forward_s=math.nan,
            sample_s=math.nan,
            draft_s=math.nan,
            draft_forward_s=math.nan,
            emitted=tuple(results.emitted),
            finished=tuple(results.finished),
            failed=tuple(results.failed),
            verified=tuple(verified),
            tuner_s=depths.plan_s,
            speculates=self._scheduler.num_spec_tokens > 0,
            switch=switch,
        )

    def _append(self, output: Any, num_drafted: int, results: Results) -> list[Verified]:
        """Append a request's new tokens up to one that ends it; return its draft, if it had one."""
        name, new = output.request_id, output.outputs[0]
        active = self._active[name]
        logprobs = [
            row[token].logprob for token, row in zip(new.token_ids, new.logprobs, strict=True)
        ]
        draft = Verified(
            request_id=name,
            position=active.num_generated,
            num_drafted=num_drafted,
            depth=num_drafted,
            num_accepted=min(max(len(logprobs) - 1, 0), num_drafted),
        )
        if results.append(active, new.token_ids, logprobs, self._decode):
            self._forget(name)
            if not output.finished:  # vLLM did not find the end itself
                self._engine.abort_request([name])
        return [draft] if num_drafted else []

    def _forget(self, request_id: str) -> None:
        del self._active[request_id]
        self._names = {one: name for one, name in self._names.items() if name in self._active}

    def load_policy(self, version: int, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Take all weights; after an error vLLM is a mixture of policies, and of no use."""
        self._refuse_unless_idle(version)
        self._finish_steps()
        self._wake()
        self._engine.collective_rpc(load_policy, args=(_finite(parameters, version),))
        self._engine.reset_prefix_cache()
        self._policy_version = version

    def load_drafter(self, tensors: Mapping[str, Tensor]) -> None:
        """Draft with other weights."""
        assert self._by_vllms_names is not None, "there is no drafter with weights"
        self._wake()
        self._engine.collective_rpc(load_drafter, args=(dict(self._by_vllms_names(tensors)),))
        self._depths.begin()

    def sleep(self) -> None:
        """Free what vLLM holds, until it is needed, if `enable_sleep_mode` allows it.

        Weights wait in main memory (vLLM's level 1), the cache is dropped; else vLLM keeps all.
        """
        may_sleep = getattr(self._engine.model_config, "enable_sleep_mode", False)
        if may_sleep and not self._active and not self._engine.is_sleeping():
            self._finish_steps()
            self._engine.sleep(level=1)

    def _finish_steps(self) -> None:
        """Wait for steps that were scheduled ahead; their requests have ended."""
        core = self._engine.engine_core.engine_core
        while getattr(core, "batch_queue", None):
            self._engine.step()

    def _wake(self) -> None:
        if self._engine.is_sleeping():
            torch.cuda.empty_cache()  # what the learner has freed
            self._engine.wake_up()

    def close(self) -> None:
        """End vLLM's executor."""
        self._engine.engine_core.shutdown()

    def save_drafter(self, path: Path) -> None:
        """Write the drafter that vLLM has learned, if there is one by now."""
        self._engine.collective_rpc(save_if_learned, args=(str(path),))

    @property
    def _scheduler(self) -> Any:
        return self._engine.engine_core.engine_core.scheduler


def _params(own: SamplingParams, noise_key: int) -> Any:
    """Return a request's parameters as vLLM's; stop strings are found here."""
    from vllm import SamplingParams as Params
    from vllm.sampling_params import RequestOutputKind

    return Params(
        temperature=own.temperature,
        top_k=own.top_k,
        top_p=own.top_p,
        min_p=own.min_p,
        max_tokens=own.max_tokens,
        stop_token_ids=list(own.stop_token_ids),
        ignore_eos=True,
        seed=noise_key,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _finite(parameters: Iterable[tuple[str, Tensor]], version: int) -> list[tuple[str, Tensor]]:
    """Return the weights; NonFiniteError names one that is not finite."""
    found = [(name, tensor.detach()) for name, tensor in parameters]
    if not are_finite(dict(found)):
        name = next(name for name, tensor in found if not are_finite({name: tensor}))
        raise NonFiniteError(f"{name} is not finite in policy version {version}")
    return found
