"""`longtail bench serve`: what drafting is worth to those who ask over HTTP.

The tiny reasoner, and the same function grown to 100M parameters, each with its eagle1 drafter:

    off        plain decoding
    on         the default: draft what pays, guarded
    peer       transformers serve, one call at a time, where it can be run

With `--soak N` nothing is measured: N requests, good and bad, must leave nothing behind. What needs
torch is imported when the measuring starts.
"""

import argparse
import json
import sys

from longtail.bench.engine.run import pin
from longtail.bench.serve.options import Setting, add_arguments, read_setting
from longtail.errors import ConfigError
from longtail.system import machine

__all__ = ["add_arguments", "run"]

_SOAK_CALLERS, _SOAK_TOKENS = 32, 24


def run(args: argparse.Namespace) -> int:
    """Measure, print the card, and end with one JSON line."""
    setting = read_setting(args)
    everywhere = machine.usable_cpus()
    cpus = pin(setting.threads)
    try:
        from longtail.bench.serve import measure as cells
    except ImportError as error:
        raise ConfigError(
            f"bench serve needs the server ({error}): {machine.pip_install('serve')}"
        ) from error
    from longtail.bench.common.report import finish, pin_threads, show
    from longtail.bench.serve import card
    from longtail.bench.serve.peer import measure_peer

    pin_threads(setting.threads)
    if setting.soak:
        return _soak(setting)
    points, rivals = [], {}
    elsewhere = sorted(set(everywhere) - set(cpus)) or cpus
    with cells.Clients(elsewhere) as clients:
        for name in setting.models:
            subject = cells.open_subject(name, setting, _say)
            with cells.both_arms(subject, setting) as ports:
                points += cells.measure(subject, setting, ports, clients, _say)
                rivals[name] = measure_peer(subject, setting, ports, clients, _say)
    *others, last = card.tables(setting, points, cpus)
    for table in others if not args.json else []:
        show(*table)
    finish(*last, card.as_json(setting, points, rivals), json_only=args.json)
    return 0


def _soak(setting: Setting) -> int:
    """Soak the first model's server, which drafts; 1 if anything was lost or left behind."""
    from longtail.bench.serve.measure import ROOM, open_subject, serve_subject
    from longtail.bench.serve.soak import soak
    from longtail.serve.options import Limits

    subject = open_subject(setting.models[0], setting, _say)
    limits = Limits(max_running=8, max_queue=16, max_len=ROOM + _SOAK_TOKENS)
    served = serve_subject(subject, limits, drafts=True)
    found = soak(served, subject.name, setting.soak, callers=_SOAK_CALLERS, max_tokens=_SOAK_TOKENS)
    _say("clean" if found.is_clean else "NOT clean")
    print(json.dumps(found.numbers()), flush=True)
    return 0 if found.is_clean else 1


def _say(text: str) -> None:
    print(f"bench serve: {text}", file=sys.stderr, flush=True)
