"""The model card of a trained agent: how it was trained, how to use it, evaluations, and learning curves."""

from __future__ import annotations

import importlib.util
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .. import tiny_llava
from ..config import GTRConfig
from ..evaluation.comparison import CURVES, curve
from ..evaluation.comparison_figures import draw_curves
from ..responses.safe_text import storable
from ..storage.files import atomic_write
from ..tasks import module_of
from ..tasks.base import Task
from .logged_evaluations import evaluation_points, last_point
from .run_log import command_line

CARD_FILE = "README.md"
CURVES_FILE = "curves.png"
TAGS = ("trl-gtr", "trl", "gtr", "ppo", "reinforcement-learning", "vision-language-agent")
COST = {
    "corrector/calls": "{:,.0f} calls",
    "corrector/tokens": "{:,.0f} tokens",
    "corrector/usd_spent": "{:,.2f} US dollars",
}
PAPER = {
    "title": "GTR: Guided Thought Reinforcement Prevents Thought Collapse in RL-based VLM Agent Training",
    "id": "2503.08525",
    "citation": textwrap.dedent("""\
        @article{wei2025gtr,
            title  = {GTR: Guided Thought Reinforcement Prevents Thought Collapse in RL-based VLM Agent Training},
            author = {Tong Wei and Yijun Yang and Junliang Xing and Yuanchun Shi and Zongqing Lu and Deheng Ye},
            year   = 2025,
            eprint = {arXiv:2503.08525}
        }"""),
}
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class TrainedAgent:
    """The agent a card describes.

    Args:
        name: The model's name.
        hub_model_id: Its name on the Hub; `None` if it is not there.
        base_model: Name or folder of the starting model.
        is_adapter: It is an adapter for the base model, not a full model.
        corrector: The corrector; `None` if there is none.
        guide: Who else teaches thoughts; empty for nobody.
        log: The run's log history.
        paper: `title`, `id` and `citation`.
    """

    name: str
    hub_model_id: str | None
    base_model: str
    is_adapter: bool
    task: Task
    corrector: str | None
    guide: str
    args: GTRConfig
    log: Sequence[Mapping[str, Any]]
    paper: Mapping[str, str]
    tags: Sequence[str] = ()

    @property
    def base_on_hub(self) -> str | None:
        """The base model's name on the Hub, if it came from there."""
        is_name = _HUB_NAME.fullmatch(self.base_model) and not Path(self.base_model).is_dir()
        return self.base_model if is_name else None


def write_model_card(folder: str | Path, agent: TrainedAgent) -> None:
    """Write `README.md` and, if matplotlib is installed, the learning curves."""
    folder = Path(folder)
    drawn = {name: words for name, words in CURVES.items() if len(curve({"log": agent.log}, name))}
    has_curves = bool(drawn) and importlib.util.find_spec("matplotlib") is not None
    if has_curves:
        with atomic_write(folder / CURVES_FILE) as file:
            draw_curves([{"arm": agent.task.name, "seed": agent.args.seed, "log": agent.log}], file, drawn)
    with atomic_write(folder / CARD_FILE) as file:
        file.write_text(storable(str(model_card(agent, has_curves))), "utf-8")


def model_card(agent: TrainedAgent, has_curves: bool = False) -> ModelCard:
    sections = [
        f"# {agent.name}",
        _introduction(agent),
        "## Play one step",
        _snippet(agent),
        "## Evaluation",
        _evaluation(agent),
        *([f"![Learning curves]({CURVES_FILE})"] if has_curves else []),
        "## Training",
        _training(agent),
        "## Citation",
        f"```bibtex\n{agent.paper['citation']}\n```",
    ]
    return ModelCard(f"---\n{_metadata(agent).to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n")


def _metadata(agent: TrainedAgent) -> ModelCardData:
    return ModelCardData(
        library_name="trl-gtr",
        pipeline_tag="image-text-to-text",
        base_model=agent.base_on_hub,
        base_model_relation=("adapter" if agent.is_adapter else "finetune") if agent.base_on_hub else None,
        tags=list(dict.fromkeys([*TAGS, agent.task.name, *agent.tags])),
        model_name=agent.name,
        eval_results=_eval_results(agent) or None,
    )


def _eval_results(agent: TrainedAgent) -> list[EvalResult]:
    """Results of the trained agent only, not from before or during training."""
    results = []
    for measure, title in (("success", "Success rate"), ("true_thoughts", "True thoughts")):
        for name, points in evaluation_points(agent.log, measure, is_over=True).items():
            point = last_point(points, "after")
            if point is None:
                continue
            interval = f" (95 % interval {point.low:.3f} to {point.high:.3f})" if point.low < point.high else ""
            results.append(
                EvalResult(
                    task_type="reinforcement-learning",
                    task_name="Reinforcement learning",
                    dataset_type=agent.task.name,
                    dataset_name=agent.task.name,
                    dataset_split=name or None,
                    metric_type=measure,
                    metric_name=title + interval,
                    metric_value=round(point.value, 4),
                )
            )
    return results


def _introduction(agent: TrainedAgent) -> str:
    base = agent.base_on_hub
    shipped = tiny_llava.name_of(agent.base_model)
    if base:
        words = f"[{base}](https://huggingface.co/{base})"
    elif shipped in tiny_llava.VARIANTS:
        words = f"`{shipped}`, the million-parameter model that ships with trl-gtr"
    else:  # don't publish local paths
        words = f"`{Path(agent.base_model).name}`" if agent.base_model else "a model built from scratch"
    task, paper = agent.task.name, f"https://huggingface.co/papers/{agent.paper['id']}"
    what = (
        f"An adapter that turns {words} into an agent for the task **{task}**, trained"
        if agent.is_adapter
        else f"A vision-language agent for the task **{task}**, trained from {words},"
    )
    return (
        f"{what} with [Guided Thought Reinforcement]({paper}). It looks at a picture, writes its thought as "
        "JSON, and acts."
    )


def _snippet(agent: TrainedAgent) -> str:
    """Code that plays one step with the saved agent, using only its task, its folder and transformers."""
    kind = type(agent.task)
    if kind.__module__.startswith("trl_gtr."):
        options = "".join(f", {name}={value!r}" for name, value in agent.task.options.items())
        names, task = "load_policy, make_task", f'make_task("{agent.task.name}"{options})'
        own = ""
    else:
        names, task = "load_policy", f"{kind.__name__}()  # with its training settings"
        own = f"from {module_of(agent.task)} import {kind.__name__}\n"
    where = repr(agent.hub_model_id or agent.args.output_dir)
    if agent.hub_model_id and agent.is_adapter:
        where, own = f"snapshot_download({where})", "from huggingface_hub import snapshot_download\n" + own
    later = "# Later prompts have earlier turns before them: see `trl_gtr.tasks.memory.Memory`.\n"
    later = later if agent.task.history_turns else ""
    return f"""```python
from PIL import Image
{own}from trl_gtr import {names}

task = {task}
model, processor = load_policy({where})

env = task.make_env(evaluation=True)
observation, info = env.reset(seed=0)

content = [{{"type": "image"}}, {{"type": "text", "text": task.prompt(observation, info)}}]
prompt = processor.apply_chat_template([{{"role": "user", "content": content}}], add_generation_prompt=True)
inputs = processor(images=Image.fromarray(observation), text=prompt, return_tensors="pt")
output = model.generate(**inputs, max_new_tokens={agent.args.max_completion_length}, do_sample=False)
answer = processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

response = task.format.parse(answer)
print("thought:", response.thought)
print("action:", response.action)
action = task.to_env_action(response, info)
if action is not None:  # a legal one
    observation, reward, terminated, truncated, info = env.step(action)
    print("reward:", reward)
{later}```"""


def _evaluation(agent: TrainedAgent) -> str:
    success = evaluation_points(agent.log, is_over=True)
    if not success:
        return "It was not evaluated."
    true_thoughts = evaluation_points(agent.log, "true_thoughts", is_over=True)
    rows = ["| episodes | success before training | success after | true thoughts after |", "|---|---|---|---|"]
    for name, points in success.items():
        before, after = (last_point(points, moment) for moment in ("before", "after"))
        thoughts = last_point(true_thoughts.get(name, []), "after")
        cells = (name or "all", before or "–", after or "–", f"{thoughts.value:.0%}" if thoughts else "–")
        rows.append(f"| {' | '.join(map(str, cells))} |")
    how = "greedy decoding" if agent.args.eval_greedy else "sampled responses"
    return "\n".join(rows) + f"\n\nShare of episodes won, with its 95 % interval in brackets; played with {how}."


def _training(agent: TrainedAgent) -> str:
    last = {name: value for entry in agent.log for name, value in entry.items()}
    lines = [f"- updates: {max((entry['step'] for entry in agent.log), default=0):,}"]
    if "env_steps" in last:
        lines.append(f"- environment steps: {last['env_steps']:,.0f}")
    if agent.guide:
        lines.append(f"- guide: {agent.guide}")
    if agent.corrector is None:
        lines.append("- corrector: none" if agent.guide else "- corrector: none (PPO alone)")
    else:
        cost = [words.format(last[name]) for name, words in COST.items() if name in last]
        corrected = curve({"log": agent.log}, "corrector/corrected")
        words = [f"- corrector: {agent.corrector}"]
        if len(corrected):
            words.append(
                f"corrected {corrected[0]:.0%} of thoughts in the first update, {corrected[-1]:.0%} in the last"
            )
        lines.append("; ".join([*words, f"cost: {', '.join(cost) or 'no paid calls'}"]))
    lines.append(f"- command: `{command_line(sys.argv)}`")
    return "\n".join(lines)
