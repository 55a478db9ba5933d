"""Writes the parts of the pages that come from the code: `python docs/generate.py`.

A part lies between `<!-- begin generated: NAME -->` and `<!-- end generated -->`, so that GitHub shows it too.
tests/test_docs.py fails while a page is out of date.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).parent
PART = re.compile(r"(<!-- begin generated: (.+?) -->\n).*?(<!-- end generated -->)", re.DOTALL)


def generated(page: str) -> str:
    """The page with its generated parts as the code has them now."""

    def fill(part: re.Match[str]) -> str:
        kind, _, argument = part[2].partition(" ")
        content = PARTS[kind](argument) if argument else PARTS[kind]()
        return f"{part[1]}\n{content}\n\n{part[3]}"

    return PART.sub(fill, page)


def configuration_fields() -> str:
    """Every field that `GTRConfig` declares itself and supports."""
    from trl_gtr.config import GTRConfig, refused_fields

    rows = []
    for field in dataclasses.fields(GTRConfig):
        if "rule" in field.metadata and field.name not in refused_fields():
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            rows.append((f"`{field.name}`", f"`{default!r}`", field.metadata["help"]))
    return _table(("field", "default", "what it does"), rows)


def arguments(path: str) -> str:
    """Every option that a dataclass declares."""
    rows = [
        (f"`{field.name}`", f"`{field.default!r}`", field.metadata["help"])
        for field in dataclasses.fields(_find(path))
    ]
    return _table(("option", "default", "what it does"), rows)


def unsupported_fields() -> str:
    from trl_gtr.config import refused_fields

    return _table(("field", "instead"), [(f"`{name}`", instead) for name, instead in refused_fields().items()])


def preset_values() -> str:
    """One row per setting, one column per preset."""
    from trl_gtr.distributed.presets import PRESETS

    names = dict.fromkeys(name for preset in PRESETS.values() for name in preset)
    rows = [
        (f"`{name}`", *(f"`{preset[name]!r}`" if name in preset else "" for preset in PRESETS.values()))
        for name in names
    ]
    return _table(("setting", *(f"`{name}`" for name in PRESETS)), rows)


def members(path: str) -> str:
    """What a subclass of a base class may define. A method without a body is one that every subclass must define."""
    rows = []
    for member in _members(_find(path)):
        default = "*required*" if member.required else f"`{member.default}`" if member.default else "see text"
        rows.append((f"`{member.signature}`", default, member.doc))
    return _table(("member", "default", "what it is"), rows)


def docstring(path: str) -> str:
    """A class's docstring, its headings in bold."""
    text = re.sub(r"^## (.+)$", r"**\1**\n", inspect.getdoc(_find(path)) or "", flags=re.MULTILINE)
    return _in_fences(text)


def functions(paths: str) -> str:
    """Functions of a module, each with its signature and docstring: `package.module: first, second`."""
    module, _, names = paths.partition(": ")
    parts = []
    for name in names.split(", "):
        tree = ast.parse(inspect.getsource(_find(f"{module}.{name}"))).body[0]
        assert isinstance(tree, ast.FunctionDef)
        parts.append(f"```text\n{_signature(tree)}\n```\n\n{_in_fences(ast.get_docstring(tree) or '')}")
    return "\n\n".join(parts)


def guidance(study: str) -> str:
    """What each method reaches alone and with guidance, from a study's numbers in `assets/results`."""
    from trl_gtr.evaluation.comparison import guidance_markdown

    return guidance_markdown(_runs(study)).rstrip()


def costs(words: str) -> str:
    """What each method costs, from some of a study's runs: `study task seed …`."""
    from trl_gtr.evaluation.comparison import cost_markdown

    study, task, *seeds = words.split()
    runs = [run for run in _runs(study) if run["task"] == task and str(run["seed"]) in seeds]
    return cost_markdown(runs).rstrip()


def teacher(study: str) -> str:
    """What each arm of a study with merged teachers reaches, from its numbers in `assets/results`."""
    from trl_gtr.evaluation.comparison import teacher_markdown

    return teacher_markdown(_runs(study)).rstrip()


def _runs(study: str) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads((DOCS / "assets" / "results" / f"{study}.json").read_text("utf-8"))
    return runs


PARTS: dict[str, Callable[..., str]] = {
    "configuration": configuration_fields,
    "arguments": arguments,
    "refused": unsupported_fields,
    "presets": preset_values,
    "members": members,
    "docstring": docstring,
    "functions": functions,
    "guidance": guidance,
    "costs": costs,
    "teacher": teacher,
}


class _Member(NamedTuple):
    signature: str
    default: str
    required: bool
    doc: str


def _members(cls: type) -> Iterator[_Member]:
    """Read from the source, which alone knows the text below an attribute."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_"):
            default = ast.unparse(node.value) if node.value else ""
            signature = f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}"
            yield _Member(signature, default, not default, _text_of(following))
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if not any(decorator == "classmethod" or decorator.endswith(".setter") for decorator in decorators):
                signature = node.name if "property" in decorators else _signature(node)
                body = node.body[1:]  # without the docstring
                yield _Member(signature, _constant(body), not body, _one_line(ast.get_docstring(node) or ""))


def _constant(body: list[ast.stmt]) -> str:
    """What a method returns that does nothing else."""
    match body:
        case [ast.Return(value=ast.Constant() | ast.Dict() | ast.Tuple() as value)]:
            return ast.unparse(value)
    return ""


def _text_of(node: ast.stmt | None) -> str:
    """The text that stands alone below an attribute, its docstring."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return _one_line(inspect.cleandoc(node.value.value))
    return ""


def _signature(node: ast.FunctionDef) -> str:
    arguments = ast.unparse(node.args).removeprefix("self, ").removeprefix("self")
    return f"{node.name}({arguments})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")


def _find(path: str) -> type:
    module, _, name = path.rpartition(".")
    found: type = getattr(importlib.import_module(module), name)
    return found


def _in_fences(text: str) -> str:
    """Sessions (`>>> …`) as code blocks."""
    return re.sub(r"^(>>> .*(?:\n(?!\n).*)*)", r"```pycon\n\1\n```", text, flags=re.MULTILINE)


def _one_line(text: str) -> str:
    return re.sub(r"\[(`[^`]+`)\]", r"\1", re.sub(r"\s+", " ", text))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *[tuple(cell.replace("|", "\\|") for cell in row) for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    for path in sorted(DOCS.glob("*.md")):
        old = path.read_text("utf-8")
        new = generated(old)
        if new != old:
            path.write_text(new, "utf-8")
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
