"""Variables of a chat template that have an effect if a caller sets them."""

import re
from collections.abc import Iterable

from jinja2 import Environment, TemplateError, nodes

_GIVEN = {"raise_exception", "strftime_now", "loop", "caller", "varargs", "kwargs"}


def variables(template: str) -> frozenset[str]:
    """Return the variables that a template reads where it need not have set them.

    Of a malformed template there are none.

    Example: "{% for m in messages %}{% set x = m %}{{ x }}{% endfor %}" reads messages, not x.
    """
    source = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)  # transformers' own tag
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(source)
    except (TemplateError, RecursionError, ValueError):
        return frozenset()
    macros = list(tree.find_all(nodes.Macro))
    known = _GIVEN | environment.globals.keys() | {macro.name for macro in macros}
    found = _read(tree.body, known)
    for macro in macros:  # it is called when the rest is set
        found |= _read(macro.body, known | {argument.name for argument in macro.args})
    return frozenset(found)


def _read(statements: Iterable[nodes.Node], known: set[str]) -> set[str]:
    """Return what statements read beyond `known`, to which they add what is set behind them."""
    found = set[str]()
    for node in statements:
        if isinstance(node, nodes.Macro):
            continue
        if isinstance(node, nodes.If):
            every = (node, *node.elif_)
            found |= set().union(*(_names(each.test) for each in every)) - known
            ways = []
            for body in (*(each.body for each in every), node.else_):
                way = set(known)
                found |= _read(body, way)
                if not any("raise_exception" in _names(each) for each in body):
                    ways.append(way)
            known |= set.intersection(*ways) if ways else set()
            continue
        heads = list(node.iter_child_nodes(exclude=("body", "else_")))
        own = set().union(*(_names(each, loads=False) for each in heads))
        is_set = isinstance(node, nodes.Assign | nodes.AssignBlock)
        found |= set().union(*map(_names, heads)) - (known if is_set else known | own)
        found |= _read(getattr(node, "body", ()), known | own)
        found |= _read(getattr(node, "else_", ()), set(known))
        known |= own if is_set else set()
    return found


def _names(node: nodes.Node, *, loads: bool = True) -> set[str]:
    """Return the variables that an expression reads, or those that it sets."""
    found = [node, *node.find_all(nodes.Name)]
    return {
        each.name
        for each in found
        if isinstance(each, nodes.Name) and (each.ctx == "load") == loads
    }
