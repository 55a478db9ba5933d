"""The guide of GTR by itself: what a rollout's corrections leave in the buffer, what is counted, what is saved."""

from types import SimpleNamespace

import pytest
import torch
from rollout_cases import rollout
from toy import ColourTask, build_toy_model, quiet_config

from trl_gtr.correctors import ExpertCorrector
from trl_gtr.correctors.base import failed
from trl_gtr.distributed.means import Means
from trl_gtr.guides.base import Guide, GuidedRun
from trl_gtr.guides.corrected import CorrectedThoughts, choose_guide, with_failures
from trl_gtr.policy.scoring import VLMPolicy
from trl_gtr.types import Correction

TASK = ColourTask()
RED = Correction("corrected", thought={"thoughts": "it is red"}, action="red")


@pytest.fixture(scope="module")
def policy():
    return VLMPolicy(*build_toy_model(), temperature=1.0)


def attached(guide, policy, tmp_path, **settings):
    args = quiet_config(tmp_path, **settings)
    processes = SimpleNamespace(rank=0, world_size=1)
    guide.attach(GuidedRun(args, TASK, policy, torch.nn.Identity(), processes, lambda *_: None, lambda *_: None))
    return guide


def judged(*corrections):
    played = rollout(
        [[0.0] for _ in corrections], response=TASK.format.parse('{"thoughts": "it is", "action": "red"}')
    )
    played.corrections = list(corrections)
    return played


def test_labels_go_into_the_buffer_and_corrected_steps_are_counted(policy, tmp_path):
    guide, means = attached(CorrectedThoughts(ExpertCorrector()), policy, tmp_path), Means()
    flawed = Correction("corrected", thought={"thoughts": "it is rosé"}, action="red")  # é is in no vocabulary
    played = judged(RED, None, Correction("right"), flawed, failed("timeout"), RED)
    assert guide.labels(played, update=3, means=means) == 3
    assert [sample.update for sample in guide.buffer.samples()] == [3, 3]
    texts = {policy.spans.text(sample.target_ids[: sample.num_labels]) for sample in guide.buffer.samples()}
    assert texts == {'{"thoughts": "it is red'}
    assert means.reduce()["labels/special_tokens"] == pytest.approx(1 / 3)


def test_failures_are_counted_by_kind_in_place_of_the_correctors_own(policy, tmp_path):
    class Counting(ExpertCorrector):
        def metrics(self):
            return {"corrector/calls": 9.0, "corrector/failed_timeout": 5.0, "corrector/fallback_failed_budget": 1.0}

    guide = attached(CorrectedThoughts(Counting()), policy, tmp_path)
    for _ in range(2):
        guide.labels(judged(failed("timeout"), RED), update=0, means=Means())
    metrics = guide.metrics()
    assert metrics["corrector/failed_timeout"] == 2.0
    assert metrics["corrector/calls"] == 9.0
    assert "corrector/fallback_failed_budget" not in metrics
    assert with_failures({"corrector/failed_late": 3.0}, {}) == {}


def test_a_guide_continues_from_its_state(policy, tmp_path):
    class Counting(ExpertCorrector):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def state_dict(self):
            return {"calls": self.calls}

        def load_state_dict(self, state):
            self.calls = state["calls"]

    guide = attached(CorrectedThoughts(Counting()), policy, tmp_path)
    guide.corrector.calls = 7
    guide.labels(judged(RED, failed("timeout"), RED), update=1, means=Means())
    file = tmp_path / "guide.pt"
    torch.save(guide.state_dict(), file)
    again = attached(CorrectedThoughts(Counting()), policy, tmp_path)
    again.load_state_dict(torch.load(file, weights_only=True))  # nothing in it is executed
    assert again.corrector.calls == 7
    assert again.metrics() == guide.metrics()
    drawn, expected = ([s.target_ids.tolist() for s in each.buffer.sample(8)] for each in (again, guide))
    assert drawn == expected


def test_the_state_of_another_guide_is_left_aside_with_a_warning(policy, tmp_path, caplog):
    guide = attached(CorrectedThoughts(ExpertCorrector()), policy, tmp_path)
    guide.load_state_dict({})
    assert not caplog.records
    guide.load_state_dict({"updates": 3, "buffer": {}})  # a merged teacher's
    assert "the corrector's labels start from scratch" in caplog.text
    assert len(guide.buffer) == 0


def test_a_guide_without_a_run_says_so(policy):
    with pytest.raises(RuntimeError, match="GTRTrainer"):
        CorrectedThoughts(ExpertCorrector()).labels(judged(RED), update=0, means=Means())


def test_which_guide_a_trainer_has(tmp_path):
    corrector, given = ExpertCorrector(), Guide()
    cloning, alone = quiet_config(tmp_path), quiet_config(tmp_path, thought_cloning_coef=0.0)
    made = choose_guide(None, corrector, cloning)
    assert isinstance(made, CorrectedThoughts)
    assert made.corrector is corrector
    assert choose_guide(given, None, cloning) is given
    assert type(choose_guide(None, None, alone)) is Guide
    with pytest.raises(ValueError, match="not both"):
        choose_guide(given, corrector, cloning)
    with pytest.raises(ValueError, match="needs a `corrector`"):
        choose_guide(None, None, cloning)


def test_a_guide_that_does_nothing_is_complete():
    guide, means = Guide(), Means()
    guide.check(TASK)
    assert (guide.corrector, guide.buffer) == (None, None)
    assert guide.labels(judged(RED), update=0, means=means) == 0
    assert guide.shaping(judged(RED), None, Means()) is None
    guide.after_update(torch.nn.Identity(), Means())
    guide.load_state_dict(guide.state_dict())
    assert guide.metrics() == {}
    assert means.reduce() == {}
    guide.close()
