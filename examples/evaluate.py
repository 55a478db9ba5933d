"""Play a task with one or more agents on the same deals and compare them; the same as `trl-gtr evaluate`.

    python examples/evaluate.py --task points24 --hands pool --agents expert random tiny runs/points24
    python examples/evaluate.py --task ezpoints --agents openai:gpt-4o --episodes 50
    python examples/evaluate.py --task alfworld --split valid_unseen --episodes all

An agent is `expert`, `random`, `tiny`, a folder or hub name of a vision-language model, or `openai:MODEL` for one
behind an OpenAI-compatible server (`--base_url`). Greedy unless `--temperature` says otherwise. Success is shown with
its 95 % interval, over all deals, over those that can be won, and by the task's own kinds of deals. ALFWorld's games
and a set of Points24's hands are each played once before any comes again; `--episodes all` ends there.
"""

from __future__ import annotations

from trl_gtr.scripts import evaluate as evaluate_command


def main() -> int:
    return evaluate_command.main(description=__doc__, prog="examples/evaluate.py")


if __name__ == "__main__":
    raise SystemExit(main())
