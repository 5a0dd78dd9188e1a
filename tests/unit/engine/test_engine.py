"""The engine from outside: how completions end, what is refused, what is left behind (nothing)."""

from collections.abc import Generator

import pytest
import torch

from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.engine.shared_engine import SharedEngine
from longtail.engine.speculation.speculator import Speculation
from longtail.engine.text import Piece, stream
from longtail.errors import RequestError
from longtail.generator import StepReport
from longtail.model.hf.weights import hf_rows
from longtail.speculation.strategy import Strategy
from longtail.types import Completion, FinishReason, Request
from support.drafters import RIGHT, ScriptedDrafter
from support.engine_requests import request_of
from support.fakes import decode_pieces, markov_model, scripted_model
from support.tiny_models import tiny_model

LIMITS = EngineLimits(max_running=4, max_step_tokens=16, max_len=64)
# "The answer is <b>42</b>, done", with a stop string across tokens and a character across two.
PIECES = ("The", " ans", "wer is <", "b>4", "2</", "b", ">, ", b"\xe6\x97", b"\xa5", " done", "!")
EOS = len(PIECES) - 1


DECODE = decode_pieces(PIECES)


def scripted_engine(limits: EngineLimits = LIMITS) -> RolloutEngine:
    return RolloutEngine(scripted_model(len(PIECES)), DECODE, limits)


def ask(name: str = "a", prompt: tuple[int, ...] = (0,), **sampling: object) -> Request:
    return request_of(name, prompt, 7, **{"max_tokens": 20, **sampling})


def joined(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def is_idle(engine: RolloutEngine) -> bool:
    return engine.num_unfinished == 0 and engine.kv_usage().free == engine.kv_usage().total


@pytest.mark.parametrize(
    ("request_", "tokens", "text"),
    [
        (ask(stop_token_ids=(EOS, 3)), (1, 2, 3), " answer is <b>4"),
        (ask(stop=("never", "</b>")), (1, 2, 3, 4, 5, 6), " answer is <b>42"),
        (ask(prompt=(3, 4, 5, 6), stop=("</b>",), max_tokens=2), (7, 8), "\u65e5"),
    ],
    ids=["token, kept", "string across tokens, cut", "not of the prompt"],
)
def test_a_stop_ends_a_completion(request_, tokens, text):
    (done,) = scripted_engine().generate([request_])
    assert (done.tokens, done.text, len(done.logprobs)) == (tokens, text, len(tokens))
    assert (done.finish_reason is FinishReason.STOP) == (request_.prompt_tokens == (0,))


def reading(engine: RolloutEngine, request: Request) -> Generator[Piece | Completion]:
    return stream(SharedEngine(lambda: engine).run([request]), DECODE, request)


def test_a_stream_marks_drafted_pieces():
    text = (0, *range(1, len(PIECES)))
    drafter = ScriptedDrafter({"a": text}, RIGHT, vocab_size=len(PIECES))
    engine = scripted_engine()
    engine.speculate(Speculation.fixed(drafter, Strategy(depth=2, size=2)))
    *pieces, done = reading(engine, ask(stop_token_ids=(EOS,)))
    assert isinstance(done, Completion)
    assert joined(pieces) == done.text
    assert is_idle(engine)
    # two drafted tokens a step, then the target's own; the last of a step counts as that
    assert [(piece.text, piece.drafted) for piece in pieces] == [
        (" answer is <", True), ("b>4", False), ("2</b", True), (">, ", False),
        ("\u65e5", True), (" done", False), ("!", False),
    ]  # fmt: skip


def test_closing_a_stream_aborts_the_request():
    engine = scripted_engine()
    pieces = reading(engine, ask())
    next(pieces)
    assert not is_idle(engine)
    pieces.close()
    assert is_idle(engine)


def test_a_stream_ends_when_someone_aborts_its_request():
    """It used to go on stepping, for ever while others were in progress."""
    engine = scripted_engine()
    engine.submit(ask("other"))
    pieces = reading(engine, ask())
    assert next(pieces) == Piece(text=" ans", drafted=False)
    engine.abort("a")
    assert list(pieces) == []
    with pytest.raises(RequestError, match="'a' is not in progress"):
        engine.abort("a")
    assert engine.num_unfinished == 1


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask(prompt=(1, -3, 4)), "holds token -3,"),
        (
            Request(request_id="a", prompt_tokens=(1,), noise_key=2**63),
            "noise_key 9223372036854775808, beyond a signed 64-bit integer",
        ),
    ],
    ids=["negative", "key"],
)
def test_a_request_that_cannot_be_served_is_refused_before_any_work(request_, message):
    engine = scripted_engine()
    with pytest.raises(RequestError, match=message):
        engine.generate([ask("fine"), request_])
    with pytest.raises(RequestError, match=message):
        engine.submit(request_)
    assert is_idle(engine)


def test_duplicate_ids_leave_no_request_in_progress():
    """The first of the two used to stay behind and block the next pull."""
    engine = scripted_engine()
    with pytest.raises(RequestError, match="'a' is already in progress"):
        engine.generate([ask("a"), ask("b"), ask("a")])
    assert is_idle(engine)
    engine.submit(ask())
    with pytest.raises(RequestError, match="'a' is already in progress"):
        engine.submit(ask())
    assert engine.num_unfinished == 1


def test_a_callback_that_raises_leaves_no_request_in_progress():
    engine = scripted_engine()

    def on_step(report: StepReport) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate([ask("a"), ask("b")], on_step)
    assert is_idle(engine)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"kv_tokens": 63}, "kv_tokens = 63 cannot hold one request of 64 tokens"),
        ({"kv_tokens": -1}, "kv_tokens = -1: it must be at least 0"),
        ({"max_running": 0}, "max_running = 0: it must be at least 1"),
        ({"max_len": 0}, "max_len = 0: it must be at least 1"),
    ],
    ids=str,
)
def test_limits_under_which_the_engine_could_stall_are_refused(limits, message):
    with pytest.raises(RequestError, match=message):
        EngineLimits(**{"max_running": 4, "max_step_tokens": 16, "max_len": 64, **limits})


def test_more_length_than_the_model_has_positions_is_refused():
    with pytest.raises(RequestError, match="may reach 513 tokens, but the model has 512 positions"):
        RolloutEngine(
            tiny_model(),
            decode_pieces(PIECES),
            EngineLimits(max_running=1, max_step_tokens=1, max_len=513),
        )


@pytest.mark.parametrize("drafted", [False, True])
def test_an_exception_of_one_request_ends_that_request_and_no_other(drafted):
    """Half a surrogate in a stop string ended the engine's thread, hence every request."""

    def decode(tokens):
        if tuple(tokens[:2]) == (3, 4):  # only 'bad' begins there
            raise UnicodeEncodeError("utf-8", "\ud83d", 0, 1, "surrogates not allowed")
        return decode_pieces(PIECES)(tokens)

    texts = {"good": range(11), "bad": range(2, 11)}
    drafter = ScriptedDrafter(texts, RIGHT, vocab_size=len(PIECES))
    drafting = Speculation.fixed(drafter, Strategy(depth=3)) if drafted else None
    engine = RolloutEngine(scripted_model(len(PIECES)), decode, LIMITS, speculation=drafting)
    alone = engine.generate([ask("good")])
    engine.submit(ask("good"))
    engine.submit(ask("bad", prompt=(2,), stop=("!",)))
    done, failed = [], []
    while engine.num_unfinished:
        report = engine.step()
        done += report.finished
        failed += report.failed
    assert done == alone
    assert [each.request_id for each in failed] == ["bad"]
    assert is_idle(engine)
    with pytest.raises(UnicodeEncodeError):
        engine.generate([ask("bad", prompt=(2,), stop=("!",))])
    assert is_idle(engine)


def test_a_list_is_finished_although_someone_else_is_in_progress():
    """A stranger's completion used to be counted as one of the list."""
    engine = scripted_engine()
    engine.submit(ask("stranger", max_tokens=1))
    engine.submit(ask("slow stranger", max_tokens=19))
    (done,) = engine.generate([ask("mine", max_tokens=5)])
    assert (done.request_id, len(done.tokens)) == ("mine", 5)
    assert engine.num_unfinished == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.bias": torch.zeros(11)}, r"model.bias has shape \(11,\) there.* no such"),
        ({"model.norm.weight": torch.ones(1)}, r"model.norm.weight has shape \(1,\) there"),
        ({"model.norm.weight": None}, "it lacks model.norm.weight"),
    ],
    ids=["one more", "broadcast", "one less"],
)
def test_weights_of_another_model_are_refused(changes, message):
    """A copy would stretch a tensor of one element over all of them."""
    engine = scripted_engine()
    tensors = {**hf_rows(markov_model(torch.zeros(11, 11))), **changes}
    given = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    with pytest.raises(RequestError, match="policy version 1 is of another model: " + message):
        engine.load_policy(1, given)
    assert engine.policy_version == 0
