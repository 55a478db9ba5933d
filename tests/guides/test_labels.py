"""From a correction to a label: what is taught, and what is thrown away and counted."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from alfworld_cases import INFO as ALFWORLD_INFO, RIGHT as ALFWORLD_THOUGHT
from rollout_cases import transition
from tokenizer_cases import mistral, sentencepiece_like
from tokenizers import normalizers
from toy import ColourTask, build_toy_model
from vlms import FAMILIES, character_tokenizer, llava_over, load_family, save_family

from trl_gtr import make_task, tiny_llava
from trl_gtr.correctors import ExpertCorrector
from trl_gtr.engines.transformers import TransformersEngine
from trl_gtr.guides.labels import LabelMaker
from trl_gtr.policy.loading import special_texts
from trl_gtr.policy.network import PolicyWithValue, ValueHead
from trl_gtr.policy.scoring import VLMPolicy
from trl_gtr.types import Correction, CorrectionRequest

PHRASES = ['{"thoughts": "', '", "action": "', '"}']
SPELT = '{"thoughts": "an <image> </s>, a <pad> and a <unk>", "action": "stand"}'
ON_20 = {"Dealer Card": [[10, "K", "H"], [10, "K", "S"]], "Player Card": [[10, "J", "H"], [10, "Q", "S"]]}
CASES = {
    "blackjack": (ON_20, {"thoughts": "My total is 20 and the dealer shows 10, so I {}."}, "stand", "hit"),
    "number_line": (
        {"Target": 4, "Current": 1},
        {"current number": 1, "target number": 4, "thoughts": "I am at 1 and have to reach 4, so I choose {}."},
        "+",
        "-",
    ),
    "points24": (
        {"Cards": ["HT", "SA", "C9", "D4"], "Numbers": [10, 1, 9, 4], "Formula": ["4", "+", "9"]},
        {
            "cards": ["4", "9", "A", "10"],
            "formula": "4+9",
            "thoughts": "I aim at 4+9+1+10=24, so the next symbol is {}.",
        },
        "+",
        "*",
    ),
    "ezpoints": (
        {"Cards": ["H3", "S9"], "Numbers": [3, 9], "Formula": ["3", "+"]},
        {"cards": ["3", "9"], "formula": "3+", "thoughts": "I aim at 3+9=12, so the next symbol is {}."},
        "9",
        "3",
    ),
    "alfworld": (
        ALFWORLD_INFO,
        {"thoughts": ALFWORLD_THOUGHT.replace("take mug 1 from countertop 1", "{}")},
        "take mug 1 from countertop 1",
        "go to cabinet 1",
    ),
}


@pytest.fixture(scope="module")
def toy_policy() -> VLMPolicy:
    return VLMPolicy(*build_toy_model(), temperature=1.0)


def maker(policy: VLMPolicy, task: Any, clone: str = "thoughts_and_right_actions") -> LabelMaker:
    return LabelMaker(SimpleNamespace(clone=clone), task, policy)  # type: ignore[arg-type]


def step(task: Any, thought: dict[str, Any], action: str, info: Any) -> Any:
    return SimpleNamespace(response=task.format.respond(thought, action), info=info)


def saying(thought: dict[str, Any], action: str) -> dict[str, Any]:
    return {**thought, "thoughts": thought["thoughts"].format(action)}


# --- a thought that concludes another action -----------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("verdict", ["right", "corrected"])
def test_a_thought_that_concludes_another_action_is_no_label(toy_policy: VLMPolicy, name: str, verdict: Any) -> None:
    """Whoever the corrector is: an API, a cache or an object of the user's own."""
    info, thought, right, wrong = CASES[name]
    task = make_task(name)
    labels = maker(toy_policy, task)
    for said, flaw in ((wrong, "contradictory"), (right, None)):
        words = saying(thought, said)
        correction = Correction(verdict, thought=words if verdict == "corrected" else None, action=right)
        label = labels.label(step(task, words, wrong, info), correction)
        assert label is not None
        assert (label.flaw, label.num_labels > 0) == (flaw, flaw is None)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("said", ["right", "wrong"])
@pytest.mark.parametrize("done", ["right", "wrong"])
def test_the_experts_labels_conclude_its_action(toy_policy: VLMPolicy, name: str, said: str, done: str) -> None:
    info, thought, right, wrong = CASES[name]
    task = make_task(name)
    response = task.format.respond(saying(thought, {"right": right, "wrong": wrong}[said]), right)
    response = replace(response, action={"right": right, "wrong": wrong}[done])
    request = CorrectionRequest(np.zeros((2, 2, 3), np.uint8), "", response, {}, info, task)
    (correction,) = ExpertCorrector().correct([request])
    label = maker(toy_policy, task).label(SimpleNamespace(response=response, info=info), correction)  # type: ignore[arg-type]
    assert label is not None
    assert label.flaw is None
    written = task.format.parse(toy_policy.spans.text(label.ids))
    assert task.format.conclusion(written.fields) == written.action == right


def test_without_an_action_of_the_correctors_the_thought_decides(toy_policy: VLMPolicy) -> None:
    """The agent's own may be what was wrong: the response that is written down must not contradict itself."""
    info, thought, right, wrong = CASES["number_line"]
    task = make_task("number_line")
    label = maker(toy_policy, task).label(
        step(task, saying(thought, wrong), wrong, info), Correction("corrected", thought=saying(thought, right))
    )
    assert label is not None
    assert task.format.parse(toy_policy.spans.text(label.ids)).action == right
    assert '"action"' not in toy_policy.spans.text(label.ids[: label.num_labels])


def test_a_label_that_is_unreadable_as_ids_is_discarded() -> None:
    """NFKC makes plain quotes of wide ones, which end the string that they stand in."""
    model, processor = build_toy_model()
    processor.tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    info, thought, right, _ = CASES["number_line"]
    task, policy = make_task("number_line"), VLMPolicy(model, processor, temperature=1.0)
    for said, flaw in (("up＂", "unreadable"), ("up＂｝ and away", "unreadable"), ("ｕｐ", None)):
        words = {**thought, "thoughts": said}
        for clone in ("thoughts_and_right_actions", "responses"):
            correction = Correction("corrected", thought=words, action=right)
            label = maker(policy, task, clone).label(step(task, words, right, info), correction)
            assert label is not None
            assert (label.flaw, label.num_labels > 0) == (flaw, flaw is None)


# --- text that spells special tokens -------------------------------------------------------------------------------


def llava_with(tokenizer: Any) -> tuple[Any, Any]:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.unk_token
    return llava_over(tokenizer, hidden_size=32, vocab_size=len(tokenizer))


@pytest.fixture(scope="module", params=[*FAMILIES, "mistral", "sentencepiece", "characters", "tiny", "tiny-alfworld"])
def agent(request: Any, tmp_path_factory: Any) -> tuple[VLMPolicy, Any]:
    """Every family and every kind of vocabulary."""
    name, folder = request.param, tmp_path_factory.mktemp("policy")
    if name in FAMILIES:
        save_family(name, folder)
        model, processor = load_family(folder)
        return VLMPolicy(model, processor, temperature=1.0), model
    if name.startswith("tiny"):
        model, processor = tiny_llava.build(0, name)
        return VLMPolicy(model, processor, temperature=1.0), model
    model, processor = llava_with(
        {
            "mistral": lambda: mistral(folder),
            "sentencepiece": sentencepiece_like,
            "characters": lambda: character_tokenizer(PHRASES),
        }[name]()
    )
    return VLMPolicy(model, processor, temperature=1.0), model


def test_text_is_encoded_as_text(agent: tuple[VLMPolicy, Any]) -> None:
    policy, _ = agent
    spelt = SPELT + "".join(special_texts(policy.processor))
    ids = policy.encode_response(spelt)
    assert ids[-1] == policy.eos_token_ids[0]
    assert policy.is_text(ids[:-1])
    assert policy.spans.text(ids) == spelt
    # The tokenizer that encodes prompts still knows its special tokens, …
    tokenizer = policy.processor.tokenizer
    image = policy.processor.image_token
    assert tokenizer.encode(image, add_special_tokens=False) == [tokenizer.convert_tokens_to_ids(image)]
    # … and text without any is encoded as ever.
    plain = '{"thoughts": "My total is 16 and I take mug 1 – é", "action": "hit"}'
    if policy.spans.text(policy.encode_response(plain)) == plain:  # one vocabulary has no é
        assert policy.encode_response(plain)[:-1].tolist() == tokenizer.encode(plain, add_special_tokens=False)


def test_fixed_phrases_stay_single_tokens_beside_special_ones() -> None:
    policy = VLMPolicy(*tiny_llava.build(), temperature=1.0)
    phrases = [str(t) for t in policy.processor.tokenizer.added_tokens_decoder.values() if not t.special]
    assert phrases
    for phrase in phrases:
        ids = policy.encode_response(f"{phrase}<image>")
        assert policy.spans.token_bytes(int(ids[0])).decode() == phrase
        assert policy.is_text(ids[:-1])


def test_a_label_that_spells_an_image_can_be_scored(agent: tuple[VLMPolicy, Any]) -> None:
    policy, model = agent
    module = PolicyWithValue(model, ValueHead(model.config.get_text_config().hidden_size, [8]))
    image = np.zeros((56, 56, 3), np.uint8)
    ids = policy.encode_response(SPELT + policy.processor.image_token)
    with torch.no_grad():
        logprobs, mask = policy.score_tokens(module, ["What?"], [image], [ids])
    assert mask.sum() == len(ids)
    assert torch.isfinite(logprobs).all()


def test_a_prompt_that_spells_special_tokens_shows_one_image(
    agent: tuple[VLMPolicy, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A foreign environment may write anything into an observation."""
    policy, model = agent
    image = np.zeros((56, 56, 3), np.uint8)
    spelt = "The page says " + " ".join(special_texts(policy.processor))
    plain, foreign, again = (policy.encoder.encode([text], [image]) for text in ("What?", spelt, spelt + "!"))
    special = torch.tensor(sorted(set(range(len(policy._is_text))) - set(np.flatnonzero(policy._is_text).tolist())))
    counts = [torch.isin(inputs["input_ids"], special).sum() for inputs in (plain, foreign, again)]
    assert counts[0] == counts[1] == counts[2] > 0
    assert caplog.text.count("A prompt contains the text of a special token") == 1
    assert len(TransformersEngine(policy, model).generate([spelt], [image])) == 1


def toy_labels(processor: Any = None, clone: str = "corrected_thoughts") -> LabelMaker:
    model, own = build_toy_model()
    return maker(VLMPolicy(model, processor or own, temperature=1.0), ColourTask(), clone)


def test_labels_end_before_the_action_where_a_tokenizer_normalises() -> None:
    """Composed and decomposed accents: the ids spell another number of characters than was rendered."""
    processor = build_toy_model()[1]
    processor.tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace("é", "e")]
    )
    labels = toy_labels(processor)
    thought = {"thoughts": "it is re\u0301\u0065\u0301\u0065\u0301d"}
    label = labels.label(transition(), Correction("corrected", thought=thought, action="blue"))
    assert label is not None
    assert label.flaw is None
    assert label.num_labels > 0
    assert "action" not in labels.policy.spans.text(label.ids[: label.num_labels])


def test_a_lone_surrogate_is_not_a_label() -> None:
    labels = toy_labels(clone="thoughts")
    response = labels.task.format.parse('{"thoughts": "it is \\ud800", "action": "red"}')
    assert response.valid
    label = labels.label(transition(response=response), Correction("right", action="red"))
    assert label is not None
    assert (len(label.ids), label.num_labels, label.flaw) == (0, 0, "lone_surrogates")
