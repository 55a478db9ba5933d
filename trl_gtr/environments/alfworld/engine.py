"""The TextWorld engine of ALFWorld, without the work that it repeats.

State, operators, goal and planner are TextWorld's and Fast Downward's own. What is saved:

- the grammar is parsed once (`grammar.py`), and the command of an operator is written once a game;
- a game is translated for the planner once, where TextWorld does it four times, and the last translations are kept.

Needs the extra: `pip install "trl-gtr[alfworld]"`.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import fast_downward
import textworld.logic
from alfworld.agents.utils.misc import Demangler
from fast_downward.translate.pddl import conditions
from mementos.core import _memento_cache
from textworld.envs.pddl.logic import Atom, PddlState
from textworld.generator.game import EntityInfo
from textworld.logic import Placeholder, Proposition, Variable

from .grammar import Context, Grammar, parse_grammar
from .process import translating

KEPT_TRANSLATIONS = 512
"""Games whose translation stays in memory: about a quarter of a megabyte each for real games."""

_TASK = re.compile(r'(?<="rhs": "Your task is to: )[^"\\#{}\[\]]*(?=")')
_TASK_MARK = "THE TASK"


@dataclass(frozen=True)
class EngineState:
    """What the engine says after a command."""

    feedback: str
    admissible_commands: list[str]
    """Sorted, without repetitions."""
    won: bool


@dataclass(frozen=True)
class Translation:
    """A game as the planner reads it, with what TextWorld needs of its source."""

    sas: bytes
    """The planning task, compressed."""
    types: Mapping[str, list[str]]
    kinds: Mapping[str, str]
    """Object → type."""
    parameters: Mapping[str, tuple[tuple[str, str], ...]]
    """Action → its parameters, each a name and a type."""
    facts: tuple[tuple[str, tuple[str, ...]], ...]
    changing: frozenset[str]
    """Predicates that some action changes."""


@dataclass(frozen=True)
class Operator:
    """An action with its arguments."""

    name: str
    command: str | None
    """`None` if its wording depends on the state."""
    template: str
    feedback_rule: str
    mapping: Mapping[Placeholder, Variable]


# Each engine has a copy of the planner's library to itself. A copy that was unloaded makes the process crash when it
# ends, so copies go from one engine to the next.
_FREE_LIBRARIES: list[Any] = []
_TRANSLATIONS: OrderedDict[tuple[str, str], Translation] = OrderedDict()


def translate(domain: str, problem: str) -> Translation:
    """The game in the planner's language: about half a second for a real game, nothing for one that is kept."""
    key = (domain, problem)
    if key in _TRANSLATIONS:
        _TRANSLATIONS.move_to_end(key)
        return _TRANSLATIONS[key]
    with translating():
        task, sas = fast_downward.pddl2sas(domain, problem)
    translation = Translation(
        sas=zlib.compress(sas.encode(), 1),
        # Reversed: of a type that is there twice (`object`), the first one counts.
        types={kind.name: list(kind.supertype_names) for kind in reversed(task.types)},
        kinds={thing.name: thing.type_name for thing in task.objects},
        parameters={
            action.name: tuple((parameter.name.strip("?"), parameter.type_name) for parameter in action.parameters)
            for action in task.actions
        },
        facts=tuple(
            (atom.predicate, tuple(atom.args))
            for atom in task.init
            if isinstance(atom, conditions.Atom) and atom.predicate != "="
        ),
        changing=frozenset(effect.literal.predicate for action in task.actions for effect in action.effects),
    )
    _TRANSLATIONS[key] = translation
    while len(_TRANSLATIONS) > KEPT_TRANSLATIONS:
        _TRANSLATIONS.popitem(last=False)
    return translation


class GameState(PddlState):
    """TextWorld's state of a game, made from a translation that is already there."""

    def __init__(self, library: Any, translation: Translation) -> None:
        self._facts: dict[Any, set[Proposition]] = defaultdict(set)
        self._vars_by_name: dict[str, Variable] = {}
        self._vars_by_type: dict[str, set[Variable]] = defaultdict(set)
        self._var_counts: Counter[str] = Counter()
        self._logic = textworld.logic.GameLogic()
        self._operators: dict[int, Any] = {}
        self.downward_lib = library
        self.name2type = translation.kinds
        for name, parents in translation.types.items():
            self._logic.types.add(textworld.logic.Type(name, parents))
        library.load_sas(zlib.decompress(translation.sas))
        for name, arguments in translation.facts:
            self.add_fact(Proposition(name, [Variable(argument, self.name2type[argument]) for argument in arguments]))
        atoms = (Atom * library.get_state_size())()
        library.get_state(atoms)
        for atom in atoms:
            fact = atom.get_fact(self.name2type)
            if not fact.is_negation:
                self.add_fact(fact)

    def facts_named(self, predicate: str) -> Iterator[Proposition]:
        for signature, facts in self._facts.items():
            if signature.name == predicate:
                yield from facts

    def applicable_operators(self) -> Any:
        """The operators that can be applied now, as Fast Downward's records."""
        operators = (fast_downward.Operator * self.downward_lib.get_applicable_operators_count())()
        self.downward_lib.get_applicable_operators(operators)
        return operators

    def apply_record(self, record: Any) -> None:
        self._operators = {record.id: record}
        self.apply(record)


class TextEngine:
    """One game at a time: `load`, `reset`, `step`. A step takes milliseconds.

    Fast Downward keeps its state in a library that every engine loads for itself; its translator has globals, so that
    engines belong into processes, not threads.
    """

    def __init__(self) -> None:
        self._library: Any = _FREE_LIBRARIES.pop() if _FREE_LIBRARIES else fast_downward.load_lib()
        self.state: GameState | None = None
        self.entities: dict[str, EntityInfo] = {}
        # Of the game that is loaded.
        self._game: Mapping[str, Any] = {}
        self._task: str | None = None
        self._actions: Mapping[str, Any] = {}
        self._grammar: Any = None
        self._translation: Any = None
        # Of the episode.
        self._operators: dict[int, Operator] = {}
        self._commands: dict[str, Any] = {}
        self._cached: dict[str, bool] = {}

    def load(self, game: Mapping[str, Any]) -> None:
        """`game`: the contents of a `game.tw-pddl` file (`pddl_domain`, `grammar`, `pddl_problem`)."""
        _forget_facts()
        self._game = game
        text = game["grammar"]
        tasks = _TASK.findall(text)
        # The task is the only difference between two games' grammars: without it, one parse does for all of them.
        self._task = tasks[0] if len(tasks) == 1 else None
        self._actions, rules = parse_grammar(_TASK.sub(_TASK_MARK, text) if self._task is not None else text)
        self._grammar = Grammar(rules)
        self._translation = translate(game["pddl_domain"], game["pddl_problem"])
        self.state = None

    def reset(self) -> EngineState:
        self.state = GameState(self._library, self._translation)
        self.entities = _entities(self.state)
        self._operators = {}
        self._cached = {
            name: not self._grammar.predicates(action.template) & (self._translation.changing | {"?"})
            for name, action in self._actions.items()
        }
        feedback = self._grammar.derive("#intro#", Context(self.state, self.entities, {}))
        if self._task is not None:
            feedback = feedback.replace(_TASK_MARK, self._task, 1)
        return self._observe(feedback)

    @property
    def says_put(self) -> bool:
        """The game is of the older dialect, "put X in/on Y"."""
        return self._actions["putobject"].template.startswith("put ")

    def step(self, command: str) -> EngineState:
        """Do what an admissible command says; to any other the engine answers that nothing happens."""
        assert self.state is not None, "reset the engine first"
        record = self._commands.get(command.strip())
        if record is None:
            return self._observe("Nothing happens.")
        operator = self._operators[record.id]
        self.state.apply_record(record)
        context = Context(self.state, self.entities, operator.mapping)
        return self._observe(self._grammar.derive(operator.feedback_rule, context))

    def close(self) -> None:
        """Give the library back. The engine can't be used any more."""
        if self._library is not None:
            _FREE_LIBRARIES.append(self._library)
            self._library, self.state = None, None

    def plan(self) -> list[str]:
        """Fast Downward's own way to the goal from here; empty if there is none. For tests: it takes seconds."""
        assert self.state is not None, "reset the engine first"
        with translating():
            _, sas = fast_downward.pddl2sas(self._game["pddl_domain"], self._game["pddl_problem"], optimize=True)
        self._library.load_sas_replan(sas.encode())
        if not self._library.replan(False):
            return []
        records = (fast_downward.Operator * self._library.get_last_plan_length())()
        self._library.get_last_plan(records)
        return [self._command(self._operator(record)) for record in records]

    def _observe(self, feedback: str) -> EngineState:
        assert self.state is not None
        commands: dict[str, Any] = {}
        names = set()
        for record in self.state.applicable_operators():
            operator = self._operators.get(record.id)
            if operator is None:
                operator = self._operators[record.id] = self._operator(record)
            if operator.name not in names:
                names.add(operator.name)
                commands.setdefault(self._command(operator), record)
        self._commands = commands
        return EngineState(feedback, sorted(commands), bool(self.state.check_goal()))

    def _operator(self, record: Any) -> Operator:
        name = record.name
        action, *arguments = name.split()
        # The translator adds parameters of its own behind those that an operator names.
        parameters = self._translation.parameters[action][: len(arguments)]
        mapping = {
            Placeholder(parameter, kind): Variable(argument, kind)
            for (parameter, kind), argument in zip(parameters, arguments, strict=True)
        }
        entry = self._actions[action]
        operator = Operator(name, None, entry.template, entry.feedback_rule, mapping)
        if not self._cached[action]:
            return operator
        return Operator(name, self._command(operator), entry.template, entry.feedback_rule, mapping)

    def _command(self, operator: Operator) -> str:
        if operator.command is not None:
            return operator.command
        return self._grammar.derive(operator.template, Context(self.state, self.entities, operator.mapping))


def _forget_facts() -> None:
    """Empty TextWorld's store of the facts that it has ever made: about 1,000 a game, 1.3 MB, never needed again.

    Facts are equal by what they say, not by identity, so that those in use elsewhere are none the worse for it.
    """
    for key in [key for key in _memento_cache if key[0] is Proposition]:
        del _memento_cache[key]


def _entities(state: GameState) -> dict[str, EntityInfo]:
    """Everything in the game under the name that ALFWorld gives it ("mug 1")."""
    entities = {
        variable.name: EntityInfo(variable.name, variable.type) for fact in state.facts for variable in fact.arguments
    }
    names = Demangler(game_infos=entities)
    for entity in entities.values():
        entity.name = names.demangle_alfred_name(entity.id)
        entity.definite, entity.indefinite = "the", "a"
    return entities
