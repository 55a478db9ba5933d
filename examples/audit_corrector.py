"""Is a corrector any good, and what will it cost? Grades it on sampled states before a run.

    python examples/audit_corrector.py --task points24 --corrector openai --corrector_model gpt-4o --states 50

Half of the thoughts that it is shown are the expert's, half are spoilt: cards misread, another state's plan.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np
from rich.console import Console
from rich.table import Table

from trl_gtr import CorrectionRequest, CorrectorArguments, make_corrector
from trl_gtr.correctors.audit import grade, report
from trl_gtr.planning.observations import sample_states
from trl_gtr.scripts.arguments import TaskArguments, parse_arguments
from trl_gtr.scripts.usage import one_line_errors
from trl_gtr.types import Usage


@dataclass
class AuditArguments(TaskArguments):
    states: int = field(default=50, metadata={"help": "How many thoughts the corrector is asked about."})
    env_steps: int = field(default=15_000, metadata={"help": "Length of the run that the cost is estimated for."})
    seed: int = field(default=0, metadata={"help": "Decides which states are sampled."})


def spoil(requests: list[CorrectionRequest], seed: int) -> list[CorrectionRequest]:
    """Every second step gets the thought of another state in which it is wrong."""
    rng, spoilt = np.random.default_rng(seed), list(requests)
    for i in range(1, len(requests), 2):
        for j in rng.permutation(len(requests)):
            if not all(requests[i].task.judge(requests[j].response, requests[i].info).values()):
                spoilt[i] = replace(requests[i], response=requests[j].response)
                break
    return spoilt


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def main() -> None:
    with one_line_errors():
        args, corrector_args = parse_arguments((AuditArguments, CorrectorArguments), description=__doc__)
        task, corrector = args.make_task(), make_corrector(corrector_args, audit_share=0.0)
        if corrector is None:
            raise ValueError("--corrector none has nothing to audit: name another one.")
        corrector.check(task)
    requests = spoil(sample_states(task, args.states, args.seed), args.seed)
    started = time.perf_counter()
    try:
        answers = corrector.correct(requests)
    finally:
        corrector.close()
    seconds = time.perf_counter() - started
    found = report(grade(*pair) for pair in zip(answers, requests, strict=True))
    usage = sum((answer.usage for answer in answers), Usage())
    latencies = np.array([answer.latency for answer in answers])
    scale = args.env_steps / len(requests)
    table = Table("measure", "value", title=f"{corrector.identity} on {task.name}")
    table.add_row("graded thoughts, of them wrong", f"{found.graded}, {percent(found.wrong_thoughts)}")
    table.add_row("precision: changed thoughts that were wrong and are true now", percent(found.precision))
    table.add_row("recall: wrong thoughts that it made true", percent(found.recall))
    table.add_row("false alarms: right thoughts that it changed", percent(found.false_alarms))
    table.add_row("failed", percent(found.failed))
    table.add_row("latency, median and 95 %", f"{np.median(latencies):.3f} s, {np.quantile(latencies, 0.95):.3f} s")
    table.add_row(f"estimate for {args.env_steps} steps: calls", f"{usage.calls * scale:.0f}")
    table.add_row("  tokens", f"{(usage.prompt_tokens + usage.completion_tokens) * scale:.0f}")
    table.add_row("  USD", f"{usage.usd * scale:.2f}")
    table.add_row("  time if nothing hid it", f"{seconds * scale / 60:.1f} min")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
