"""Will it fit, how long will it take, and what will it cost? Estimates a run without loading any weights.

    trl-gtr plan --config examples/configs/points24_llava.yaml --processes 8 --card A100-80

The model is built from the checkpoint's config alone, and one micro-batch is traced through it; anything not counted
this way is marked as assumed. Accepts all options of the run, and the `--config_file` of `accelerate launch`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from trl import ModelConfig

from ..config import refused_fields
from ..correctors import CorrectorArguments
from ..guides.arguments import GuideArguments
from ..planning.cards import CARDS, card_named
from ..planning.memory import Sharding
from ..planning.plan import Plan, make_plan
from ..planning.work import PlannedConfig, Speed
from .arguments import parse_arguments
from .launch import show_help
from .options import Option
from .settings import find_own_modules, task_of
from .train import ScriptArguments
from .usage import one_line_errors

NOTE = (
    "counted: on the model without weights. traced: a micro-batch through the run's own code, without weights. "
    "assumed: a guess; set it."
)


@dataclass
class PlanArguments:
    """Settings of the plan itself, besides those of the run."""

    card: str = field(default="A100-80", metadata={"help": f"The GPU: {', '.join(CARDS)}."})
    utilisation: float = field(
        default=0.35, metadata={"help": "Assumed share of the card's peak FLOPs while learning."}
    )
    decoding_utilisation: float = field(
        default=0.15, metadata={"help": "Assumed share of the card's memory bandwidth while generating."}
    )
    config_file: str | None = field(
        default=None, metadata={"help": "Accelerate config: number of processes and DeepSpeed's ZeRO stage."}
    )
    json: bool = field(default=False, metadata={"help": "Print JSON."})

    _argument_group_name = "the plan"


def main(argv: Sequence[str] | None = None, description: str | None = __doc__) -> int:
    with one_line_errors():
        types = (PlanArguments, ScriptArguments, PlannedConfig, ModelConfig, CorrectorArguments, GuideArguments)
        words = list(argv or [])
        find_own_modules()
        show_help(words, task_of(words, ScriptArguments.task), "trl-gtr plan", description, _own_options())
        sharding = Sharding()
        if "--config_file" in words[:-1]:
            sharding = Sharding.read(words[words.index("--config_file") + 1])
        plan_args, script, args, model_args, corrector_args, guide_args = parse_arguments(
            types,
            words,
            description=description,
            defaults={"report_to": "none", "processes": sharding.processes or 1},
            prog="trl-gtr plan",
            hidden=refused_fields(),
        )
        speed, available, where = _machine(plan_args, args)
        plan = make_plan(
            script.make_task(),
            args,
            model_args,
            corrector_args,
            speed=speed,
            available=available,
            where=where,
            sharding=sharding,
            guide_args=guide_args,
        )
    if plan_args.json:
        print(json.dumps(plan.to_json(), indent=1, ensure_ascii=False))
    else:
        print_plan(plan)
    return 0


def _own_options() -> list[Option]:
    """The plan's options besides those of the run."""
    processes = next(each for each in fields(PlannedConfig) if each.name == "processes")
    own = (processes, *fields(PlanArguments))
    return [Option(each.name, each.default, each.metadata["help"], PlanArguments._argument_group_name) for each in own]


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print a table with one number per row and where it comes from."""
    table = Table(
        title=escape(plan.title),
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption=NOTE,
        caption_justify="left",
    )
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("source", style="dim")
    for section, found in plan.sections.items():
        table.add_row(f"[bold]{section}[/bold]")
        for each in found:
            loud = each.name in ("verdict", "hours", "dollars") or each.name.startswith("peak")
            style = "bold red" if each.value == "too large" else "bold" if loud else ""
            table.add_row(f"  {escape(each.name)}", escape(str(each)), escape(each.how), style=style)
        table.add_section()
    (console or Console()).print(table)


def _machine(plan_args: PlanArguments, args: PlannedConfig) -> tuple[Speed | None, float, str]:
    """The machine's speed, the memory per process, and a description of that memory."""
    for name in ("utilisation", "decoding_utilisation"):
        if not 0 < getattr(plan_args, name) <= 1:
            raise ValueError(f"--{name} must be in (0, 1], got {getattr(plan_args, name)}.")
    card = card_named(plan_args.card)
    if args.use_cpu:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return None, memory / args.processes, "this machine's, divided among its processes (use_cpu)"
    speed = Speed(card, plan_args.card, bool(args.bf16), plan_args.utilisation, plan_args.decoding_utilisation)
    return speed, card.memory, f"of {plan_args.card}, by its data sheet"
