"""The options of `trl-gtr train`, read from the source of the classes that declare them.

Importing those classes imports torch, which takes seconds, too long for `--help` or a misspelt option. So their source
is parsed instead: names, defaults, help texts, and group headings. It is the installed source, so the result is
correct for any version of transformers, TRL and accelerate.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from ..distributed.field_rules import INHERITED

# package, file and class
_TRAINING = ("transformers", "training_args.py", "TrainingArguments")
_BASE = ("trl", "trainer/base_config.py", "_BaseConfig")
_TRL_PPO = ("trl", "experimental/ppo/ppo_config.py", "PPOConfig")  # goes with distributed/ppo_trl.py
_OWN_PPO = ("trl_gtr", "distributed/ppo_own.py", "PPOConfig")  # if TRL has none
_GTR = ("trl_gtr", "config.py", "GTRConfig")
_ENGINE = ("trl_gtr", "distributed/engine_fields.py", "EngineFields")
_ENVIRONMENTS = ("trl_gtr", "distributed/engine_fields.py", "EnvironmentFields")
_TASK = ("trl_gtr", "scripts/arguments.py", "TaskArguments")
_SCRIPT = ("trl_gtr", "scripts/train.py", "ScriptArguments")
_MODEL = ("trl", "trainer/model_config.py", "ModelConfig")
_CORRECTOR = ("trl_gtr", "correctors/arguments.py", "CorrectorArguments")
_GUIDE = ("trl_gtr", "guides/arguments.py", "GuideArguments")
_HEADING = re.compile(r"\s*# --- (.+?) -+$")


@dataclass(frozen=True)
class Option:
    """A config field as a command-line option."""

    name: str
    default: Any
    """Its value, or its source code if it isn't a plain value."""
    help: str
    group: str
    refused: bool = False
    """The option is rejected with advice on what to set instead, so the help omits it."""


class UnknownSource(Exception):
    """A class isn't where the supported versions define it."""


@cache
def train_options() -> dict[str, Option]:
    """All options of a training script by name: ours first, then those inherited from TRL and transformers.

    Raises:
        UnknownSource: A class isn't where it was expected; `imported_options` always works.
    """
    script = _fields(*_TASK, group="task") | _fields(*_SCRIPT, group="task")
    model = _fields(*_MODEL, group="model")
    corrector = _fields(*_CORRECTOR, group="corrector") | _fields(*_GUIDE, group="guide")
    ppo = _TRL_PPO if _path(*_TRL_PPO[:2]).is_file() else _OWN_PPO
    inherited: dict[str, Option] = {}
    for source in (_TRAINING, _BASE, ppo):  # subclasses override inherited fields
        inherited |= _fields(*source, group="training")
    own: dict[str, Option] = {}
    for source in (_GTR, _ENGINE, _ENVIRONMENTS):
        own |= _fields(*source, group="training")
    return script | model | own | corrector | {name: each for name, each in inherited.items() if name not in own}


def imported_options(arguments: Sequence[Any]) -> dict[str, Option]:
    """The same from the imported classes (task, training, model, corrector, guide): slow, and with few groups."""
    groups = dict(zip(arguments, ("task", "training", "model", "corrector", "guide"), strict=True))
    return {
        each.name: Option(
            each.name, None if each.default is MISSING else each.default, each.metadata.get("help", ""), group
        )
        for declared, group in groups.items()
        for each in fields(declared)
        if each.init
    }


@cache
def launcher_options() -> dict[str, bool]:
    """Options of `accelerate launch` → whether they take a value."""
    found: dict[str, bool] = {}
    for node in ast.walk(_tree("accelerate", "commands/launch.py")):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names = [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
            action = next((ast.literal_eval(each.value) for each in node.keywords if each.arg == "action"), "store")
            takes_value = action not in ("store_true", "store_false")
            found |= {name[2:]: takes_value for name in names if name.startswith("--")}
    for ours in ("help", "module", "no_python"):
        found.pop(ours, None)
    return found | {"accelerate_config": True}


def _path(package: str, file: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UnknownSource(f"{package} isn't installed")
    return Path(spec.submodule_search_locations[0], file)


def _tree(package: str, file: str) -> ast.Module:
    try:
        return ast.parse(_path(package, file).read_text("utf-8"))
    except FileNotFoundError as error:
        raise UnknownSource(f"{package} has no {file}") from error


def _fields(package: str, file: str, class_name: str, group: str) -> dict[str, Option]:
    tree, lines = _tree(package, file), _path(package, file).read_text("utf-8").splitlines()
    found = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    declared = next(found, None)
    if declared is None:
        raise UnknownSource(f"{package}/{file} has no {class_name}")
    options = {}
    for node, heading in _with_headings(declared, lines, group):
        if isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            default, help_text = _default_and_help(node.value)
            options[node.target.id] = Option(node.target.id, default, help_text, heading, _refused(node))
    return options


def _with_headings(declared: ast.ClassDef, lines: list[str], group: str) -> Iterator[tuple[ast.AnnAssign, str]]:
    """A class's fields, each with the `# --- heading ---` comment above it, or `group` if there is none."""
    line = declared.lineno
    for node in declared.body:
        for text in lines[line - 1 : node.lineno]:
            if match := _HEADING.match(text):
                group = match[1]
        line = node.lineno
        if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
            yield node, group


def _default_and_help(value: ast.expr | None) -> tuple[Any, str]:
    """From `field(default=…, metadata={"help": …})`, a helper with these arguments, or a plain value."""
    if not isinstance(value, ast.Call):
        return _plain(value), ""
    named = {each.arg: each.value for each in value.keywords if each.arg}
    default = named.get("default", value.args[0] if value.args else None)
    if isinstance(factory := named.get("default_factory"), ast.Lambda):
        default = factory.body
    elif factory is not None:
        default = ast.Constant(None)
    texts = [named.get("help"), named.get("help_text"), *value.args[1:2]]
    if isinstance(metadata := named.get("metadata"), ast.Dict):
        pairs = zip(metadata.keys, metadata.values, strict=True)
        texts += [text for key, text in pairs if isinstance(key, ast.Constant) and key.value == "help"]
    help_text = next((text for text in texts if text is not None), None)
    return _plain(default), str(_plain(help_text) or "")


def _refused(node: ast.AnnAssign) -> bool:
    """Whether the field, or the rule for an inherited field, says what to set instead."""
    assert isinstance(node.target, ast.Name)
    if isinstance(node.value, ast.Call) and any(each.arg == "instead" for each in node.value.keywords):
        return True
    rule = INHERITED.get(node.target.id)
    return rule is not None and rule.instead is not None


def _plain(value: ast.expr | None) -> Any:
    if value is None:
        return None
    try:
        return ast.literal_eval(value)
    except ValueError:
        return ast.unparse(value)
