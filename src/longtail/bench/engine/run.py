"""`longtail bench engine`: generation with a real model, in longtail and in other engines.

    plain          longtail, decoding token by token
    chain, tree    longtail with one fixed strategy of drafting
    tuned          longtail as it is used: it drafts where that pays
    transformers   generate of transformers
    vllm           vLLM's CPU build, where --vllm-python names an environment that has it

Plain decoding, fixed strategies and the tuner write the same texts; the card has the share that
differs, which should be 0.
"""

from contextlib import ExitStack

from longtail.bench.common.timing import pin, pinned, progress
from longtail.bench.options import EngineBenchOptions


def run(options: EngineBenchOptions) -> int:
    """Measure, print the card, and end with one JSON line."""
    cpus = pin(options.threads)
    from longtail.bench.common.card import print_card
    from longtail.bench.common.subject import open_subject
    from longtail.bench.engine import card
    from longtail.bench.engine.measure import EngineBench, peer_pythons, start_peer
    from longtail.system.device import set_threads
    from longtail.types import SamplingParams

    set_threads(options.threads)
    log = progress("engine")
    subject = open_subject(
        options.model,
        options.prompts,
        dtype=options.dtype,
        num_prompts=2 * max(options.batches),
        sampling=SamplingParams(max_tokens=options.max_tokens),
        log=log,
    )
    with ExitStack() as stack:
        peers = {}
        for kind, python in peer_pythons(options).items():
            log(f"starting {kind}")
            peer = start_peer(kind, python, options, subject)
            peers[kind] = stack.enter_context(peer)
        bench = EngineBench(subject, options, peers, log)
        cells = [bench.measure(batch) for batch in options.batches]
    descriptions = {kind: peer.description for kind, peer in peers.items()}
    dtype = str(subject.target.model.dtype).removeprefix("torch.")
    result = card.as_json(options, cells, dtype=dtype, peers=descriptions)
    title = f"Generation by {options.model}, {dtype}, {pinned(cpus)}"
    print_card(
        [card.table(f"{title}; drafter: {options.drafter}", cells)],
        result,
        sentences=card.sentences(cells),
        json_only=options.json,
    )
    return 0
