"""Runs in which the agent sees its past: collectors, corrections, updates, evaluation, resuming."""

from contextlib import closing
from functools import partial

import numpy as np
import pytest
import torch
from function_engine import FunctionEngine
from launched import steady
from toy import ColourTask, RecallTask, nearest_colour, quiet_config, remembering

from trl_gtr import RolloutCollector, load_policy
from trl_gtr.correctors import Corrector, ExpertCorrector
from trl_gtr.evaluation.agents import ExpertAgent
from trl_gtr.evaluation.evaluate import evaluate_agent
from trl_gtr.planning.observations import observe
from trl_gtr.policy.scoring import VLMPolicy
from trl_gtr.rollouts.asynchronous_collector import AsynchronousCollector
from trl_gtr.rollouts.group_collector import GroupCollector
from trl_gtr.rollouts.overlapped_collector import OverlappedCollector
from trl_gtr.trainer import GTRTrainer
from trl_gtr.types import Correction, Generation, turns_before


class Recalling:
    """Names the colour of the last turn's picture, or of this one if there is none; as an engine and as an agent."""

    def __init__(self, task):
        self.task, self.asked = task, []

    def respond(self, prompts, images, infos=None):
        self.asked += zip(prompts, images, strict=True)
        texts = []
        for prompt, image in zip(prompts, images, strict=True):
            shown = [turn.image for turn in turns_before(prompt) if turn.image is not None]
            colour = nearest_colour(shown[-1] if shown else image)
            texts.append(self.task.format.render({"thoughts": f"it is {colour}"}, colour))
        return texts

    def generate(self, prompts, images):
        return [Generation(np.arange(3), text) for text in self.respond(prompts, images)]


class Asked(Corrector):
    def __init__(self):
        self.requests = []

    def correct(self, requests):
        self.requests += requests
        return [Correction("right") for _ in requests]


def collect(kind, task, steps, corrector=None, num_envs=3, **options):
    with closing(kind(task, corrector, num_envs=num_envs, seed=0, **options)) as collector:
        return collector.collect(FunctionEngine(Recalling(task).generate), steps)


def histories(rollout):
    """The responses and pictures that each step saw again, by environment and step."""
    return {
        (step.env_index, step.step): [
            (turn.prompt, turn.response, None if turn.image is None else turn.image.tobytes())
            for turn in turns_before(step.prompt)
        ]
        for step in rollout.transitions
    }


def expected_histories(rollout, turns, images):
    """From the steps themselves: what came before in the same episode."""
    steps = {(step.env_index, step.step): step for step in rollout.transitions}
    found = {}
    for (env, place), step in steps.items():
        before = [steps[env, place - back] for back in range(min(turns, step.episode_step), 0, -1)]
        found[env, place] = [
            (str(each.prompt), each.response.text, each.image.tobytes() if i >= len(before) - images else None)
            for i, each in enumerate(before)
        ]
    return found


@pytest.mark.parametrize(
    "kind",
    [
        RolloutCollector,
        OverlappedCollector,
        AsynchronousCollector,
        pytest.param(partial(GroupCollector, group_size=2), id="GroupCollector"),
    ],
)
def test_steps_see_what_came_before_in_their_own_episode(kind):
    task, asked = remembering(ColourTask(length=5), 3, 2), Asked()
    rollout = collect(kind, task, 8, asked, num_envs=4)
    assert histories(rollout) == expected_histories(rollout, 3, 2)
    assert max(map(len, histories(rollout).values())) == 3
    assert any(not seen for seen in histories(rollout).values())
    # what the corrector is asked about is what the agent saw
    seen = sorted(len(turns_before(request.prompt)) for request in asked.requests)
    assert seen == sorted(len(each) for each in histories(rollout).values())
    # whole episodes are kept without all that
    assert all(type(step.prompt) is str for episode in rollout.episodes for step in episode)


def test_the_observations_to_bootstrap_from_have_their_past_too():
    rollout = collect(RolloutCollector, remembering(ColourTask(length=3, terminates=False), 2, 1), 4)
    cut = [step for step in rollout.transitions if step.bootstrap]
    assert cut
    for step in cut:
        [older, last] = turns_before(step.final_prompt)
        assert (older.image, last.response) == (None, step.response.text)
        assert np.array_equal(last.image, step.image)
    for prompt, step in zip(rollout.last_prompts, rollout.transitions[-3:], strict=True):
        [last] = turns_before(prompt)  # the fourth step began a new episode
        assert np.array_equal(last.image, step.image)


def test_a_game_that_only_memory_solves():
    blind, recalling = RecallTask(), remembering(RecallTask(), 1, 1)
    assert evaluate_agent(Recalling(recalling), recalling, 40).metrics()["success"] == 1.0
    assert evaluate_agent(Recalling(blind), blind, 40).metrics()["success"] < 0.6
    assert evaluate_agent(ExpertAgent(blind), blind, 5).metrics()["success"] == 1.0
    agent = Recalling(recalling)
    evaluate_agent(agent, recalling, 2, num_envs=2)
    (first, image), (second, _) = agent.asked[0], agent.asked[2]
    assert turns_before(first) == ()
    assert np.array_equal(turns_before(second)[0].image, image)


def test_a_plan_counts_the_turns(toy_checkpoint):
    model, processor = load_policy(toy_checkpoint)
    policy = VLMPolicy(model, processor, temperature=1.0, max_completion_length=9)
    alone, after = (
        observe(task, policy, model, 12) for task in (ColourTask(length=3), remembering(ColourTask(length=3), 2, 1))
    )
    assert after.image_tokens == 2 * alone.image_tokens
    assert (
        min(after.prompt_tokens) == min(alone.prompt_tokens) < max(alone.prompt_tokens) + 10 < max(after.prompt_tokens)
    )
    assert after.picture_bytes == alone.picture_bytes  # in the cache, each is by itself


def trainer(checkpoint, folder, task=None, corrector="expert", **settings):
    args = quiet_config(folder, **{"max_completion_length": 9, "num_ppo_epochs": 2, "learning_rate": 1e-3, **settings})
    corrector = ExpertCorrector() if corrector == "expert" else corrector
    return GTRTrainer(checkpoint, args, task or remembering(ColourTask(length=5), 2, 1), corrector)


def test_ratios_start_at_one_and_a_resumed_run_is_the_same_run(toy_checkpoint, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "total_env_steps": 48}
    whole = trainer(toy_checkpoint, tmp_path / "whole", **settings)
    whole.train()
    assert max(entry["policy/ratio_start_max_dev"] for entry in whole.state.log_history) < 1e-3
    assert all(entry["policy/approx_kl"] > 1e-6 for entry in whole.state.log_history)
    assert max(len(turns_before(sample.prompt)) for sample in whole.guide.buffer.samples()) == 2
    resumed = trainer(toy_checkpoint, tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert steady(resumed.state.log_history) == steady(whole.state.log_history)
    final, again = whole.trained.state_dict(), resumed.trained.state_dict()
    assert all(torch.equal(final[name], again[name]) for name in final)
    assert any(memory.turns for memory in whole.collector.memories)  # the run was cut in mid-episode
    data = whole.corrections_dataset()
    assert max(len(row["images"]) for row in data) == 2
    for row in data:
        parts = [part["type"] for message in row["messages"] for part in message["content"]]
        assert parts.count("image") == len(row["images"])


def test_a_run_is_not_resumed_with_another_past(toy_checkpoint, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "total_env_steps": 16}
    plain = trainer(toy_checkpoint, tmp_path / "plain", ColourTask(length=5), **settings)
    plain.train()
    with pytest.raises(ValueError, match=r"task.history_turns was None and is 2"):
        trainer(toy_checkpoint, tmp_path / "other", save_strategy="steps").train(
            resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-1")
        )
    changed = trainer(toy_checkpoint, tmp_path / "other", allow_changed_config=True)
    changed.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-1"))
    assert any(memory.turns for memory in changed.collector.memories)


def test_what_the_model_cannot_do_is_said_before_training(toy_checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"history_turns=8 .*takes 64.*Lower"):
        trainer(toy_checkpoint, tmp_path, remembering(ColourTask(), 8, 0))
    with pytest.raises(ValueError, match="`one_batch_shape` doesn't work with `history_images`"):
        trainer(toy_checkpoint, tmp_path, one_batch_shape=True)
    with pytest.raises(ValueError, match="at least 0, not -1"):
        trainer("no such model", tmp_path, remembering(ColourTask(), -1, 0))  # before it is loaded
