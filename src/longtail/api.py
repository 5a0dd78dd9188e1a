"""Text generation from Python: `Engine` and the readers of tokenizers and drafters.

    from longtail import Engine, SamplingParams

    engine = Engine("smollm2")
    params = SamplingParams(temperature=0.8, max_tokens=400)
    for completion in engine.generate(["What is 27 + 15?"], params, n=4):
        print(completion.text)

`longtail generate` uses the same class, so a seed yields the same text here, there and in
`longtail serve`.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from itertools import count
from typing import Any, cast, final

import torch

from longtail.assembly.drafters import Target, check_names, read_drafter
from longtail.assembly.engine import open_engine, open_model
from longtail.drafter.formats.checkpoint import LoadedDrafter
from longtail.engine.request import EngineLimits, requests_of
from longtail.engine.shared_engine import SharedEngine
from longtail.engine.text import Piece, stream
from longtail.errors import ConfigError, RequestError
from longtail.generator import StepReport
from longtail.model.hf.model import load_config
from longtail.model.hf.tokenizer import Tokenizer
from longtail.model.hf.tokenizer import load_tokenizer as read_tokenizer
from longtail.run.base_model import model_directory
from longtail.system.device import own_engine_device, to_stderr
from longtail.types import Completion, Request, SamplingParams

PromptInput = str | Sequence[Mapping[str, Any]]
"""Plain text, which the tokenizer's BOS precedes if it has one, or chat messages, to which the
model's chat template is applied."""

OnStep = Callable[[StepReport], None]


@final
class Engine:
    """A model that writes completions, with speculative decoding where it is faster.

    Calls may overlap, in turns or in threads: they share the engine's steps.

    `model` is a name as for `--model.path`: a directory, a run of `longtail train` (its newest
    checkpoint), a hub id, a .gguf file, or "smollm2". `drafter` is a name as for
    `--speculation.drafter`: it changes the speed, never a text. `dtype` is "float32", "bfloat16" or
    "float64"; "auto" is the stored one, or float32 where that is emulated. Weights are read with
    the first request. Raises ConfigError for a model that cannot be used.

    Example: Engine("runs/quickstart", dtype="bfloat16").generate(["1+1="])[0].text
    """

    def __init__(
        self,
        model: str,
        *,
        drafter: str = "auto",
        dtype: str = "auto",
        device: str = "auto",
        max_running: int = 64,
    ) -> None:
        self._name, self._dtype, self._device = model, dtype, device
        own_engine_device(device, "device")
        check_names(drafter, field="drafter")
        self._path = model_directory(model, field="model")
        self.tokenizer = read_tokenizer(self._path)
        self.max_positions = load_config(self._path).max_positions
        """Largest number of tokens of a prompt and its completion together."""
        limits = EngineLimits.of(max_running, self.max_positions)
        self._engine = SharedEngine(lambda: open_engine(self._open(), limits, drafter))
        self._calls = count()

    def encode(self, prompt: PromptInput, max_tokens: int) -> tuple[int, ...]:
        """Return the tokens of a prompt after which `max_tokens` more fit into the model.

        Raises RequestError if they do not fit, and DataError for chat messages without a template.
        """
        if isinstance(prompt, str):
            tokens = self.tokenizer.encode(prompt, add_special_tokens=True)
        elif not _is_chat(prompt):
            raise RequestError(
                f"a prompt is {prompt!r:.80}: it must be a text, or a list of messages like "
                "{'role': 'user', 'content': '...'}"
            )
        else:
            tokens = self.tokenizer.chat(prompt)
        if max_tokens > (room := self.max_positions - len(tokens)):
            raise RequestError(
                f"max_tokens = {max_tokens}: after a prompt of {len(tokens)} tokens the model has "
                f"{max(room, 0)} of its {self.max_positions} positions left"
            )
        return tokens

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        seed: int = 0,
        on_step: OnStep | None = None,
    ) -> list[Completion]:
        """Return `n` completions of each prompt, those of one prompt next to each other.

        A text, or one chat, is one prompt. Completion i of a prompt depends on weights, prompt,
        params, seed and i alone, not on other prompts. Raises RequestError before any work if a
        prompt cannot be served.
        """
        is_list = isinstance(prompts, Sequence) and not isinstance(prompts, str)
        is_one = not is_list or any(isinstance(each, Mapping) for each in prompts)
        each = cast("Sequence[PromptInput]", [prompts] if is_one else prompts)
        requests = self._requests(each, params or SamplingParams(), n, seed)
        done: dict[str, Completion] = {}
        with closing(self._engine.run(requests, on_step)) as reports:
            for report in reports:
                done.update((completion.request_id, completion) for completion in report.finished)
        return [done[request.request_id] for request in requests]

    def stream(
        self,
        prompt: PromptInput,
        params: SamplingParams | None = None,
        *,
        seed: int = 0,
        on_step: OnStep | None = None,
    ) -> "TextStream":
        """Return an iterator over the pieces of one completion, as they are generated."""
        (request,) = self._requests([prompt], params or SamplingParams(), 1, seed)
        reports = self._engine.run([request], on_step)
        return TextStream(stream(reports, self.tokenizer.decode, request))

    def _requests(
        self, prompts: Sequence[PromptInput], params: SamplingParams, n: int, seed: int
    ) -> list[Request]:
        """Return the requests of a call, with ids of its own."""
        params = self.tokenizer.ends.stopping(params)
        tokens = [self.encode(prompt, params.max_tokens) for prompt in prompts]
        return requests_of(next(self._calls), tokens, params, seed, n)

    def _open(self) -> Target:
        return open_model(self._name, self._path, self.tokenizer, self._dtype, self._device)


@final
class TextStream(AbstractContextManager["TextStream"]):
    """The pieces of one completion; `completion` is the whole of it once the iteration has ended.

    `close`, or the end of a `with` block, aborts what is left to generate.

    Example: for piece in stream: print(piece.text, end="", flush=True)
    """

    def __init__(self, pieces: Generator[Piece | Completion]) -> None:
        self._pieces = pieces
        self.completion: Completion | None = None

    def __iter__(self) -> Iterator[Piece]:
        """Yield pieces; joined, their texts are the text of the completion."""
        for piece in self._pieces:
            if isinstance(piece, Completion):
                self.completion = piece
            else:
                yield piece

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop generating; closing twice has no effect."""
        self._pieces.close()


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and all(isinstance(each, Mapping) for each in prompt)


def load_tokenizer(model: str) -> Tokenizer:
    """Read the tokenizer of a model by any name that `Engine` takes.

    Example: load_tokenizer("smollm2").encode("1 + 1")
    """
    return read_tokenizer(model_directory(model, field="model"))


def load_drafter(
    name: str,
    model: str,
    *,
    dtype: torch.dtype | None = None,
    log: Callable[[str], None] = to_stderr,
) -> LoadedDrafter:
    """Read the weights of a drafter for a model; both names are those of the command line.

    `name` is a directory of `longtail drafter train`, a run of `longtail train`, or a directory
    in EAGLE's layout. Raises ConfigError for a drafter without weights ("history") and for one that
    does not fit the model.

    Example: load_drafter("runs/quickstart", "runs/quickstart").layer.config
    """
    path = model_directory(model, log, field="model")
    target = open_model(model, path, read_tokenizer(path))
    loaded = read_drafter(name, target, dtype, field="name")
    if loaded is None:
        raise ConfigError(f"name = {name!r}: this drafter has no weights of its own to load")
    return loaded
