"""`longtail_rollouts`: rollouts of TRL's trainers by longtail's engine.

    with longtail_rollouts() as rollouts:
        GRPOTrainer(..., args=GRPOConfig(use_vllm=True), callbacks=[rollouts.callback()])

TRL's class for vLLM is replaced inside the context, so its importance sampling, its tools and its
environments work as they do with vLLM.
"""

import functools
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, final

import torch

from longtail.assembly.drafters import Target, check_names
from longtail.assembly.precision import is_fast
from longtail.drafter.formats.eagle_export import export_drafter
from longtail.errors import ConfigError
from longtail.integrations.trl import patches
from longtail.integrations.trl.noise_keys import Batch, Tokens
from longtail.integrations.trl.patches import Ranks
from longtail.integrations.trl.sampling import LongtailGeneration, RolloutsCallback, end_tokens
from longtail.integrations.trl.session import Session
from longtail.model.hf.config import Fields, parse
from longtail.model.hf.model import empty_model
from longtail.model.hf.tokenizer import Tokenizer
from longtail.system.device import DTYPES, own_engine_device
from longtail.types import Completion, SamplingParams


@final
class Rollouts:
    """Rollouts for one trainer, made inside this context; called `longtail_rollouts`.

    `drafter` is a name as for `--speculation.drafter`: "auto" begins a fresh one, which learns
    during the run, "none" decodes plainly; completions are the same. `train` "never": no drafter
    learns; one of EAGLE never does. `seed` is that of the noise, by default the trainer's. `dtype`
    is "float32" or "bfloat16", by default what the trainer computes in, but float32 where bfloat16
    is emulated. `resume` is a checkpoint of the trainer whose drafter is used, by default the one
    in its output directory that it resumes from.
    Raises ConfigError for other values.
    """

    def __init__(
        self,
        drafter: str = "auto",
        *,
        train: Literal["idle", "never"] = "idle",
        seed: int | None = None,
        dtype: str | None = None,
        max_running: int = 64,
        resume: str | None = None,
    ) -> None:
        check_names(drafter, field="drafter")
        if train not in ("idle", "never"):
            raise ConfigError(f"train = {train!r}: give 'idle' or 'never'")
        if dtype is not None and dtype not in DTYPES:
            raise ConfigError(f"dtype = {dtype!r}: give one of {', '.join(DTYPES)}, or None")
        if max_running < 1:
            raise ConfigError(f"max_running = {max_running}: it must be at least 1")
        if resume is not None and not Path(resume).is_dir():
            raise ConfigError(
                f"resume = {resume!r}: no such directory; give a trainer's checkpoint"
            )
        self._drafter, self._learns, self._seed = drafter, train == "idle", seed
        self._dtype, self._max_running, self._resume = dtype, max_running, resume
        self._patch = ExitStack()
        self._session: Session | None = None
        self._args: Any = None
        self._state: Any = None
        self._opened: Any = None
        """The `VLLMGeneration` that the session was opened for."""
        self._is_restored = False

    def __enter__(self) -> "Rollouts":
        """Replace TRL's class for vLLM, for the trainers that are made inside."""
        make = functools.partial(LongtailGeneration, self)
        self._patch.enter_context(patches.patched(make, self._before_log))
        return self

    def __exit__(self, *_: object) -> None:
        """Give TRL its own names back; a trainer that was made inside keeps working."""
        self._patch.close()

    def callback(self) -> Any:
        """Return the callback that the trainer needs, as in `callbacks=[rollouts.callback()]`."""
        return RolloutsCallback(self)

    def _before_log(self, trainer: Any) -> None:
        """Add the metrics of the last rollouts to the trainer's own; all processes log."""
        if trainer.use_vllm and trainer.vllm_generation is self._opened:
            for name, value in self.session.drain_metrics().items():
                trainer._metrics["train"][name].append(value)

    # ---- called by TRL's side

    @property
    def session(self) -> Session:
        """The engine and its drafters, from the trainer's construction on."""
        if self._session is None:
            raise ConfigError("no trainer generates with these rollouts yet; make one first")
        return self._session

    def follow(self, args: Any, state: Any) -> None:
        """Take the trainer's arguments and the state that it updates."""
        self._args, self._state = args, state

    def open(self, settings: Any) -> Session:
        """Open the engine for a `VLLMGeneration`. Raises ConfigError for a second trainer."""
        if self._session is not None:
            raise ConfigError(
                "longtail_rollouts serves one trainer: call it once more for the second one"
            )
        if self._args is None:
            raise ConfigError(
                "callbacks: the rollouts' callback is missing; give the trainer "
                "callbacks=[rollouts.callback()]"
            )
        accelerator, self._opened = settings.accelerator, settings
        target = _open_target(settings, self._dtype)
        longest = settings.max_model_length or target.model.config.max_positions
        ranks = Ranks(accelerator.process_index, accelerator.num_processes, accelerator.device)
        self._session = Session(
            target,
            ranks,
            self._drafter,
            max_running=self._max_running,
            max_len=longest,
            learns=self._learns,
        )
        return self._session

    def generate(
        self, prompts: list[Tokens], params: SamplingParams, *, is_training: bool
    ) -> list[Completion]:
        """Return one completion of each prompt, in their order."""
        self._restore()
        state, session = self._state, self.session
        batch = Batch(
            seed=self._args.seed if self._seed is None else self._seed,
            step=state.global_step,
            is_training=is_training,
            first=session.ranks.rank * len(prompts),
        )
        device = session.target.model.device.type
        with torch.autocast(device, enabled=False):  # the engine has its own precision
            return session.generate(prompts, params, batch)

    # ---- the drafter

    def save(self, checkpoint: Path) -> None:
        """Write the drafter into a checkpoint of the trainer, as its folder `longtail`."""
        if self._session is not None:
            self._session.save(checkpoint, self._state.global_step)

    def _restore(self) -> None:
        """Continue with the drafter of the checkpoint that the trainer resumed from."""
        if self._is_restored:
            return
        self._is_restored = True
        step, given = self._state.global_step, self._resume
        if given is not None:
            if not self.session.restore(Path(given), 2**31):
                raise ConfigError(f"resume = {given!r}: it holds no drafter of longtail")
        elif step:
            named = vars(self._args).get("resume_from_checkpoint")
            places = [Path(self._args.output_dir) / f"checkpoint-{step}"]
            places += [Path(named)] if isinstance(named, str) else []
            any(self.session.restore(place, step) for place in places)

    def export(self, path: str | Path) -> Path:
        """Write the drafter in the layout that vLLM reads.

        Raises ConfigError if it has no weights, or if `path` exists.
        """
        loaded, target = self.session.drafter(), self.session.target
        if loaded is None:
            raise ConfigError(
                f"drafter = {self._drafter!r}: it has no weights of its own to export"
            )
        out, model = Path(path), target.model
        export_drafter(out, loaded, model, model.dtype)
        return out


def _open_target(settings: Any, dtype: str | None) -> Target:
    """Return an empty copy of the trainer's model, with its tokenizer."""
    model, accelerator = settings.model, settings.accelerator
    device = own_engine_device(torch.device(accelerator.device).type, "accelerator.device")
    name, inner = str(model.name_or_path or "the policy"), settings.tokenizer
    tokenizer = Tokenizer(inner, end_tokens(model, inner))
    config = parse(Fields(model.config.to_dict(), f"the trainer's model {name}"))
    tokenizer.limit(config.vocab_size)
    known = next(model.parameters()).dtype
    if dtype is None:
        is_bf16 = accelerator.mixed_precision == "bf16" or known == torch.bfloat16
        is_fast_here = is_fast(torch.bfloat16, device)
        precision = torch.bfloat16 if is_bf16 and is_fast_here else torch.float32
        precision = torch.float64 if known == torch.float64 else precision
    else:
        precision = DTYPES[dtype]
    empty = empty_model(config, precision, device)
    return Target(model=empty, tokenizer=tokenizer, directory=Path(name), name=name)


longtail_rollouts = Rollouts
