"""A fresh drafter of any target: what `auto` begins with if none is trained.

It is the same in every process: weights of a fixed seed, and the scale of the features on a fixed
text. Its draft vocabulary is the tokens that a byte-pair encoder learned first, which are common in
any text; it is renewed with the tokens that the policy generates (`drafter.eagle.fresh`).
"""

import torch

from longtail.drafter.eagle.fresh import commonest_tokens, fresh_drafter, recipe_for
from longtail.drafter.formats.checkpoint import LoadedDrafter, TrainingRecord, identity
from longtail.drafter.training.texts import pack_texts
from longtail.model.hf.tokenizer import Tokenizer
from longtail.model.transformer import Transformer
from longtail.rl.data.examples import Example

_SEED = 0
_SAMPLE = (
    "A train leaves at 9:40 and needs 2 hours and 35 minutes. When does it arrive?\n\n"
    "First add the hours: 9 + 2 = 11, so it is 11:40. Then add the minutes: 40 + 35 = 75, which is "
    "one hour and 15 minutes. The train arrives at 12:15.\n"
)
"""Text on which the size of the target's features is measured."""


def fresh(name: str, target: Transformer, tokenizer: Tokenizer) -> LoadedDrafter:
    """Return an untrained drafter in float32 for the target called `name`."""
    shape = target.config
    recipe = recipe_for(shape)
    tokens = tuple(tokenizer.encode(_SAMPLE))[: shape.max_positions]
    sample = pack_texts([Example(tokens=tokens, prompt_len=1)], len(tokens))[0]
    size = recipe.draft_vocab_size
    layer = fresh_drafter(
        recipe.config(shape), target, sample, torch.Generator().manual_seed(_SEED)
    )
    return LoadedDrafter(
        layer=layer,
        draft_ids=commonest_tokens((), size, tokenizer.eos_ids).to(target.device) if size else None,
        trained_on=identity(name, target, tokenizer),
        training=TrainingRecord(steps=0, tokens=0, unroll_steps=recipe.unroll_steps),
    )
