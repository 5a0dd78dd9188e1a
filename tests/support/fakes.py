"""Stand-ins at the engine's seams: models whose text is known, a KV cache that keeps a ledger."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from longtail.engine.batch import FlatBatch
from longtail.engine.kv_cache import KVCache, KVUsage
from longtail.engine.text import Decode
from longtail.model.attention import Attention, PackedAttention
from longtail.model.transformer import Transformer
from longtail.sampling import gumbel_noise, log_distribution
from longtail.types import Request
from support.tiny_models import tiny_config


def markov_model(
    scores: Float[Tensor, "last vocab"], dtype: torch.dtype = torch.float64
) -> Transformer:
    """A real decoder whose logits are `scores[last token]`: its layers add nothing.

    Embeddings are one-hot, the norm scales them to sqrt(vocab), and the head undoes that.
    """
    vocab_size = scores.shape[0]
    shape = {"hidden_size": vocab_size, "num_layers": 1, "head_dim": 16, "max_positions": 4096}
    model = Transformer(replace(tiny_config("llama", vocab_size), **shape, norm_eps=0.0))
    model.initialize(torch.Generator().manual_seed(0))
    layer = model.layers[0]
    with torch.no_grad():
        layer.attention.output.weight.zero_()
        layer.feed_forward.down.weight.zero_()
        model.embedding.weight.copy_(torch.eye(vocab_size))
        model.to(torch.float64).head.weight.copy_(scores.double().T * vocab_size**-0.5)
    return model.to(dtype)


def scripted_model(num_tokens: int) -> Transformer:
    """A model that writes token i + 1 after token i (and 0 after the last) under any noise."""
    return markov_model(200.0 * torch.eye(num_tokens).roll(1, 1))


def decode_pieces(pieces: Sequence[str | bytes]) -> Decode:
    """Token i is `pieces[i]`; bytes that are no whole character become U+FFFD."""
    raw = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    return lambda tokens: b"".join(raw[token] for token in tokens).decode(errors="replace")


@torch.no_grad()
def write_plainly(model: Transformer, request: Request) -> tuple[tuple[int, ...], list[float]]:
    """Tokens and logprobs of a request by the definition: one request, everything recomputed.

    Each token from a whole forward pass over its context. Stops at stop tokens and max_tokens.
    """
    tokens, logprobs = list(request.prompt_tokens), []
    for _ in range(request.sampling.max_tokens):
        attention = PackedAttention((0, len(tokens)))
        hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), attention)
        logp = log_distribution(model.logits(hidden[-1:]), request.sampling)[0]
        key, position = torch.tensor([request.noise_key]), torch.tensor([len(tokens)])
        noise = gumbel_noise(key, position, model.config.vocab_size)[0]
        token = int((logp + noise if request.sampling.temperature else logp).argmax())
        tokens.append(token)
        logprobs.append(float(logp[token]))
        if token in request.sampling.stop_token_ids:
            break
    return tuple(tokens[len(request.prompt_tokens) :]), logprobs


@final
class LedgerKV(KVCache):
    """Passes everything on to a real cache and writes down who owns what, holding which tokens."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self.room: dict[str, int] = {}
        """Tokens each request was promised room for."""
        self.held: dict[str, list[int]] = {}
        """Tokens whose KV each request holds."""

    def write(self, request_id: str, tokens: Sequence[int]) -> None:
        """Count the KV of these tokens, computed behind what the request holds."""
        self.held[request_id] += tokens
        assert len(self.held[request_id]) <= self.room[request_id], "computed beyond its room"

    def try_grow(self, request_id: str, num_tokens: int) -> bool:
        """Note the promise when it is kept."""
        before = self._kv.usage()
        if not self._kv.try_grow(request_id, num_tokens):
            assert self._kv.usage() == before, "a refusal changed something"
            return False
        self.room[request_id] = max(num_tokens, self.room.get(request_id, 0))
        self.held.setdefault(request_id, [])
        return True

    def try_share(
        self, source_id: str, target_id: str, *, num_shared: int, num_tokens: int
    ) -> bool:
        """Note what the target holds now; the source must have it."""
        assert num_shared <= len(self.held[source_id]), "the source has not computed it yet"
        assert target_id not in self.room, "only a newcomer is given a prompt"
        before = self._kv.usage()
        if not self._kv.try_share(
            source_id, target_id, num_shared=num_shared, num_tokens=num_tokens
        ):
            assert self._kv.usage() == before, "a refusal changed something"
            return False
        self.room[target_id] = num_tokens
        self.held[target_id] = self.held[source_id][:num_shared]
        return True

    def hand_over(self, source_id: str, target_id: str, num_tokens: int) -> None:
        """Note the new owner."""
        assert num_tokens <= len(self.held[source_id]), "the source has not computed it yet"
        self._kv.hand_over(source_id, target_id, num_tokens)
        del self.room[source_id]
        self.room[target_id] = num_tokens
        self.held[target_id] = self.held.pop(source_id)[:num_tokens]

    def keep(self, paths: Mapping[str, tuple[int, Sequence[int]]]) -> None:
        """Note which nodes became text; nothing is promised beyond them any more."""
        for request_id, (num_tokens, path) in paths.items():
            held = self.held[request_id]
            assert list(path) == sorted(set(path)), "a path goes down"
            nodes = [held[num_tokens + node - 1] for node in path]
            self.held[request_id] = held[:num_tokens] + nodes
            self.room[request_id] = num_tokens + len(nodes)
        self._kv.keep(paths)

    def release(self, request_id: str) -> None:
        """Release the request: nothing of it is left."""
        self._kv.release(request_id)
        del self.room[request_id], self.held[request_id]

    def usage(self) -> KVUsage:
        """Ask the real one."""
        return self._kv.usage()

    def attention(self, batch: FlatBatch) -> Attention:
        """Ask the real one."""
        return self._kv.attention(batch)
