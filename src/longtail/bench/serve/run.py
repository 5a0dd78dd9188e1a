"""`longtail bench serve`: the effect of drafting on clients over HTTP.

The tiny reasoner, and the same function grown to 100M parameters, each with its eagle1 drafter:

    off        plain decoding
    on         the default: draft while it pays, with a guard
    peer       transformers serve, one call at a time, where it can be run

With `--soak N` nothing is measured: after N requests, valid and invalid, the server must be clean.
"""

import json

from longtail.bench.common.process import Log, pin, progress
from longtail.bench.serve.options import ServeBenchOptions
from longtail.errors import ConfigError
from longtail.system import machine

_SOAK_CLIENTS, _SOAK_TOKENS = 32, 24


def run(options: ServeBenchOptions) -> int:
    """Measure, print the card, and end with one JSON line."""
    all_cpus = machine.usable_cpus()
    cpus = pin(options.threads)
    try:
        from longtail.bench.serve import measure as points_module
    except ImportError as error:
        raise ConfigError(
            f"bench serve needs the server ({error}): {machine.pip_install('serve')}"
        ) from error
    from longtail.bench.common.card import print_card
    from longtail.bench.common.timing import pin_threads
    from longtail.bench.serve import card
    from longtail.bench.serve.peer import measure_peer

    pin_threads(options.threads)
    log = progress("serve")
    if options.soak is not None:
        return _soak(options, options.soak, log)
    points, rivals = [], {}
    other_cpus = sorted(set(all_cpus) - set(cpus)) or cpus
    with points_module.Clients(other_cpus) as clients:
        for name in options.models:
            served = points_module.open_model(name, options, log)
            with points_module.both_servers(served, options) as ports:
                points += points_module.measure(served, options, ports, clients, log)
                rivals[name] = measure_peer(served, options, ports, clients, log)
    tables = card.tables(options, cpus, points)
    print_card(tables, card.as_json(options, points, rivals), json_only=options.json)
    return 0


def _soak(options: ServeBenchOptions, num_requests: int, log: Log) -> int:
    """Soak-test the first model's server with drafts; return 1 if a check failed."""
    from longtail.bench.serve.measure import PROMPT_ROOM, open_model
    from longtail.bench.serve.soak import soak
    from longtail.serve.options import Limits

    served = open_model(options.models[0], options, log)
    limits = Limits(max_running=8, max_queue=16, max_len=PROMPT_ROOM + _SOAK_TOKENS)
    server = served.server(limits, drafts=True)
    found = soak(server, served.name, num_requests, clients=_SOAK_CLIENTS, max_tokens=_SOAK_TOKENS)
    log("clean" if found.is_clean else "NOT clean")
    print(json.dumps(found.numbers()), flush=True)
    return 0 if found.is_clean else 1
