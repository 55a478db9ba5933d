"""Agents by their names."""

from __future__ import annotations

import pytest
from toy import ColourTask

from trl_gtr import (
    ExpertAgent,
    PolicyAgent,
    RandomAgent,
    ServedAgent,
    TransformersEngine,
    evaluate_agent,
    load_agent,
    make_task,
)


def test_agents_without_a_model() -> None:
    task = ColourTask()
    expert = load_agent("expert", task)
    assert isinstance(expert, ExpertAgent)
    assert evaluate_agent(expert, task, 4).success.value == 1
    assert isinstance(load_agent("random", task), RandomAgent)


def test_a_served_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    agent = load_agent("openai:some-model", ColourTask(), base_url="http://localhost:1", temperature=0.3)
    assert isinstance(agent, ServedAgent)
    assert (agent.model, agent.temperature, agent.max_completion_length) == ("some-model", 0.3, 256)


@pytest.mark.parametrize("temperature", [0.0, 0.4])
def test_a_model(temperature: float) -> None:
    agent = load_agent(
        "tiny", make_task("number_line"), temperature=temperature, max_completion_length=7, device="cpu"
    )
    assert isinstance(agent, PolicyAgent)
    assert isinstance(agent.engine, TransformersEngine)
    assert agent.greedy == (temperature == 0)
    policy = agent.engine.policy
    assert (policy.temperature, policy.max_completion_length) == (temperature or 1.0, 7)
