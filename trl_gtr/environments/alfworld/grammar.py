"""TextWorld's context-sensitive grammar, parsed once.

TextWorld re-parses a rule's text with a general parser for every admissible command of every step, which takes most of
the step's time. Here every text is parsed once per process, and the parsed symbols are used directly. The semantics
are unchanged; a test compares the texts with TextWorld's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from textworld.envs.pddl import logic, textgen
from textworld.logic import Rule


@lru_cache(maxsize=64)
def parse_grammar(text: str) -> tuple[dict[str, Any], textgen.ContextSensitiveGrammar]:
    """A game's grammar: its actions by name, and its production rules."""
    return logic._parse_and_convert(text, rule_name="pddlStart")


@lru_cache(maxsize=1024)
def parse_symbols(text: str) -> tuple[textgen.Symbol, ...]:
    return tuple(textgen._parse_and_convert(text, rule_name="symbols"))


@lru_cache(maxsize=1024)
def parse_query(text: str) -> Rule:
    return Rule.parse_conjunctive_query(text)


@lru_cache(maxsize=1024)
def parse_expression(text: str) -> ast.expr:
    return ast.parse(text.strip(), mode="eval").body


class Context:
    """What a text may refer to: the game's state, its entities, and the variables bound so far."""

    def __init__(self, state: Any, entities: Mapping[str, Any], mapping: Mapping[Any, Any]) -> None:
        self.state, self.entities, self.mapping = state, entities, mapping

    def variable(self, name: str) -> Any:
        for placeholder, variable in self.mapping.items():
            if placeholder.name == name:
                return self.entities[variable.name]
        raise ValueError(f"The game's grammar uses the variable {name!r}, which nothing binds.")

    def matches(self, query: str) -> Iterator[Context]:
        """One context per match of the query, in TextWorld's order."""
        for mapping in self.state.all_assignments(parse_query(query), self.mapping):
            yield Context(self.state, self.entities, {**self.mapping, **mapping})


class Grammar:
    """Derives texts from a game's production rules."""

    def __init__(self, rules: textgen.ContextSensitiveGrammar) -> None:
        self._rules = rules._rules

    def derive(self, text: str, context: Context) -> str:
        return "".join(self._text(symbol, context) for symbol in parse_symbols(text))

    def predicates(self, text: str) -> set[str]:
        """The predicates queried by a text; `{"?"}` if it refers to other rules."""
        found: set[str] = set()
        for symbol in parse_symbols(text):
            inner = symbol.symbol if isinstance(symbol, textgen.ListSymbol) else symbol
            if isinstance(inner, textgen.ConditionalSymbol):
                if inner.given:
                    found |= {predicate.name for predicate in parse_query(inner.given).preconditions}
                inner = inner.expression
            if isinstance(inner, textgen.NonterminalSymbol):
                found.add("?")
        return found

    def _text(self, symbol: Any, context: Context) -> str:
        if isinstance(symbol, textgen.TerminalSymbol):
            return str(symbol.symbol)
        if isinstance(symbol, textgen.NonterminalSymbol):
            return "".join(self._text(part, context) for part in self._rule(str(symbol), context))
        if isinstance(symbol, textgen.EvalSymbol):
            return str(evaluate(parse_expression(symbol.expression), context))
        if isinstance(symbol, textgen.ListSymbol):
            return self._listed(self._parts(symbol.symbol, context), context)
        return "".join(self._parts(symbol, context))

    def _parts(self, symbol: Any, context: Context) -> list[str]:
        """The texts of a conditional symbol, one per match."""
        if not isinstance(symbol, textgen.ConditionalSymbol):
            return [self._text(symbol, context)]
        contexts = context.matches(symbol.given) if symbol.given else [context]
        return [self._text(symbol.expression, match) for match in contexts]

    def _listed(self, parts: list[str], context: Context) -> str:
        if not parts:
            return self.derive("#list_empty#", context)
        if len(parts) == 1:
            return parts[0]
        separator, last = (self.derive(f"#list_{name}#", context) for name in ("separator", "last_separator"))
        return separator.join(parts[:-1]) + last + parts[-1]

    def _rule(self, name: str, context: Context) -> Any:
        """The right-hand side of the first rule that applies."""
        for rule in self._rules.get(name, ()):
            if not rule.condition or next(context.matches(rule.condition), None) is not None:
                return rule.rhs
        raise ValueError(f"The game's grammar has no rule for #{name}# that applies here.")


def evaluate(node: ast.expr, context: Context) -> Any:
    """Evaluate the few expressions grammars use: names, attributes, strings, `+` and `or`. Nothing is executed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name):
        return context.variable(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and not node.attr.startswith("_"):
        return getattr(context.variable(node.value.id), node.attr)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return evaluate(node.left, context) + evaluate(node.right, context)
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
        values = [evaluate(value, context) for value in node.values]
        return next((value for value in values if value), values[-1])
    raise ValueError(f"The game's grammar uses an expression that is not supported: {ast.unparse(node)}")
