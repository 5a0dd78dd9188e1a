"""Drafters with scripted proposals that record their observations.

A scripted drafter knows how each text goes on. Its script says by how much the token of each node
is off: 0 is what the target will draw there, if the parent is right.

    truth   a b c d          parents (0, 0, 1, 3)          a  b      1a is right, 2b is not,
                             offsets (0, 1, 0, 2)          b         3b is, 4e is not
                                                           e
"""

import abc
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from longtail.model.attention import PackedAttention
from longtail.model.transformer import Transformer
from longtail.speculation.drafter import NO_TAPS, Draftable, Drafter, Noise, Observed, Taps
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import Accepted, DraftTree, accept, cut_depth, depths


@dataclass(frozen=True, slots=True)
class Sketch:
    """A tree by how far its tokens are off."""

    parents: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()


Script = Callable[[Draftable, Strategy], Sketch]


def chain(*offsets: int) -> Script:
    """The same chain for every request, as deep as the strategy allows; the last offset repeats."""

    def sketch(request: Draftable, strategy: Strategy) -> Sketch:
        depth = min(strategy.depth, strategy.num_nodes)
        listed = (*offsets, *offsets[-1:] * depth)[:depth]
        return Sketch(tuple(range(depth)), listed)

    return sketch


RIGHT, WRONG = chain(0), chain(1)


def silent(request: Draftable, strategy: Strategy) -> Sketch:
    """No proposals."""
    return Sketch()


def ragged(seed: int) -> Script:
    """Random trees, of another size for every request and step, sometimes empty.

    Siblings often hold the same token, and the right one may come last.
    """

    def sketch(request: Draftable, strategy: Strategy) -> Sketch:
        rng = random.Random(f"{seed}/{request.request_id}/{len(request.tokens)}")
        size = rng.choice((0, rng.randint(1, strategy.num_nodes), strategy.num_nodes))
        parents = [rng.randint(max(0, i - rng.choice((0, 3, 60))), i) for i in range(size)]
        return Sketch(tuple(parents), tuple(rng.choice((0, 0, 0, 1, 2)) for _ in range(size)))

    return sketch


def listed(sketches: Sequence[Sketch]) -> Script:
    """The given trees in turn, cut to the strategy's size."""

    def sketch(request: Draftable, strategy: Strategy) -> Sketch:
        chosen = sketches[len(request.tokens) % len(sketches)]
        size = strategy.num_nodes
        return Sketch(chosen.parents[:size], chosen.offsets[:size])

    return sketch


@dataclass(slots=True)
class Memory:
    """Observed tokens of one request since it was last computed from its start."""

    start: int
    tokens: list[int] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Tokens of the request up to here have been observed, from `start` on."""
        return self.start + len(self.tokens)


class WatchfulDrafter(Drafter):
    """Checks what the engine promises every drafter, and remembers everything.

    `informed` from the start, it asks for the whole of the seam's promise: all but the root
    observed before a draft is asked for. One that is handed in later cannot.
    """

    def __init__(self, taps: Taps = NO_TAPS, *, informed: bool = True) -> None:
        super().__init__()
        self._taps, self._informed = taps, informed
        self.memories: dict[str, Memory] = {}
        self.gone: list[tuple[str, Memory]] = []
        self.num_restarts = self.num_refreshes = 0
        self.num_drafts = self.num_nodes = self.num_accepted = 0
        self._proposed: list[list[DraftTree]] = []
        """The last ones, and the ones before: it may learn of them when it was asked again."""

    @property
    def taps(self) -> Taps:
        """Features that it asks for."""
        return self._taps

    @abc.abstractmethod
    def draft(
        self, requests: Sequence[Draftable], strategy: Strategy, noise: Noise | None
    ) -> list[DraftTree]:
        """Make the trees."""

    @final
    def propose(
        self, requests: Sequence[Draftable], strategy: Strategy, noise: Noise | None
    ) -> list[DraftTree]:
        """Check what is asked and what is answered."""
        assert requests, "a call without requests"
        assert strategy.depth <= strategy.num_nodes, "levels that can have no node"
        assert len({each.request_id for each in requests}) == len(requests)
        for each in requests:
            assert each.max_depth >= 1
            assert len(each.tokens) < each.prompt_len + each.sampling.max_tokens, "it is done"
            memory = self.memories.get(each.request_id)
            if self._informed and memory is not None:
                assert memory.end == len(each.tokens) - 1, "not told of all but the root"
                assert memory.tokens == each.tokens[memory.start : -1]
        trees = self.draft(requests, strategy, noise)
        assert all(tree.size <= strategy.num_nodes for tree in trees), "the script's mistake"
        self._proposed = [*self._proposed[-1:], [tree for tree in trees if tree.size]]
        return trees

    @final
    def observe(
        self, seen: Sequence[Observed], features: Float[Tensor, "tokens features"] | None
    ) -> None:
        """Append; another start than the expected one is a computation from the start."""
        assert (features is not None) == self._taps.any
        first = 0
        for each in seen:
            assert each.num_tokens >= 1
            memory = self.memories.get(each.request_id)
            if memory is None or memory.end != each.start:
                self.num_restarts += memory is not None
                memory = self.memories[each.request_id] = Memory(each.start)
            end = each.start + each.num_tokens
            assert end <= len(each.tokens)
            memory.tokens += each.tokens[each.start : end]
            if features is not None:
                memory.features += features[first : first + each.num_tokens]
            first += each.num_tokens
        assert features is None or len(features) == first

    @final
    def learn(self, trees: Sequence[DraftTree], accepted: Sequence[Accepted]) -> None:
        """Count; the trees are what was proposed, in order, without what could be of no use."""
        assert len(trees) == len(accepted)
        meant = [_are_cut_from(trees, proposed) for proposed in self._proposed]
        del self._proposed[: meant.index(True) + 1]  # each is learned of once, in order
        for tree, found in zip(trees, accepted, strict=True):
            # The walk again, where every node on the way draws what came next.
            drawn = [-1] * (tree.size + 1)
            for node, token in zip((0, *found.path), found.tokens, strict=False):
                drawn[node] = token
            assert accept(tree, drawn).path == found.path
            self.num_drafts += 1
            self.num_nodes += tree.size
            self.num_accepted += len(found.path)

    @final
    def forget(self, request_id: str) -> None:
        """Put aside what was known."""
        if request_id in self.memories:
            self.gone.append((request_id, self.memories.pop(request_id)))

    @final
    def refresh(self) -> None:
        """Count the call; no request may be in progress."""
        assert not self.memories
        self.num_refreshes += 1


def _are_cut_from(trees: Sequence[DraftTree], proposed: Sequence[DraftTree]) -> bool:
    return len(trees) == len(proposed) and all(
        tree == cut_depth(mine, max(depths(tree.parents)))
        for tree, mine in zip(trees, proposed, strict=True)
    )


@final
class ScriptedDrafter(WatchfulDrafter):
    """Proposes what its script says of texts that it knows (prompt and all that follows).

    A `heedless` one drafts past the depth that can be of use.
    """

    def __init__(
        self,
        texts: Mapping[str, Sequence[int]],
        script: Script,
        *,
        vocab_size: int = 128,
        heedless: bool = False,
        taps: Taps = NO_TAPS,
        informed: bool = True,
    ) -> None:
        super().__init__(taps, informed=informed)
        self._texts, self._script = texts, script
        self._vocab_size, self._heedless = vocab_size, heedless

    def draft(
        self, requests: Sequence[Draftable], strategy: Strategy, noise: Noise | None
    ) -> list[DraftTree]:
        """Ask the script about each request."""
        return [self._tree(each, strategy) for each in requests]

    def _tree(self, request: Draftable, strategy: Strategy) -> DraftTree:
        sketch = self._script(request, strategy)
        ahead = self._texts[request.request_id][len(request.tokens) :]
        truth = (*ahead, *[0] * len(sketch.parents))
        tree = DraftTree(
            tokens=tuple(
                (truth[depth - 1] + offset) % self._vocab_size
                for depth, offset in zip(depths(sketch.parents), sketch.offsets, strict=True)
            ),
            parents=sketch.parents,
            margins=tuple(-float(offset) for offset in sketch.offsets),
        )
        return tree if self._heedless else cut_depth(tree, request.max_depth)


@final
class ModelChains(WatchfulDrafter):
    """Drafts coupled chains with a model, computed from the start; the target's are always right.

    Sampling is that of temperature 1.
    """

    def __init__(self, model: Transformer) -> None:
        super().__init__(informed=False)
        self._model = model

    @torch.no_grad()
    def draft(
        self, requests: Sequence[Draftable], strategy: Strategy, noise: Noise | None
    ) -> list[DraftTree]:
        """Continue each text alone."""
        assert noise is not None
        return [self._chain(i, each, strategy, noise) for i, each in enumerate(requests)]

    def _chain(self, index: int, each: Draftable, strategy: Strategy, noise: Noise) -> DraftTree:
        tokens, depth = list(each.tokens), min(strategy.depth, each.max_depth)
        for at in range(1, depth + 1):
            length, flat = len(tokens), torch.tensor(tokens)
            context = PackedAttention((0, length))
            hidden = self._model(flat, torch.arange(length), context)
            scores = self._model.logits(hidden[-1:])[0].log_softmax(-1)
            tokens.append(int((scores + noise.at_depth(at)[index]).argmax()))
        drafted = tuple(tokens[len(each.tokens) :])
        return DraftTree(tokens=drafted, parents=tuple(range(depth)), margins=(1.0,) * depth)
