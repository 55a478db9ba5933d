from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from example_scripts import example
from trl import GRPOConfig
from trl.chat_template_utils import parse_response, supports_tool_calling

from trl_gtr import load_policy
from trl_gtr.interop import prepare_model
from trl_gtr.interop.chat import EPISODE_OVER


def user(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": [{"type": "image"}, {"type": "text", "text": text}]}


def called(text: str) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "act", "arguments": {"response": text}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


# The templates of LLaVA 1.5 and SmolVLM, which know nothing of tools.
LLAVA = """\
{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}\
{% if message['role'] != 'assistant' %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}{% endfor %}\
{% else %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}\
{% generation %}{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""
SMOLVLM = """\
<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}\
{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}\
{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}\
{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    return prepare_model(*load_policy("tiny"))


@pytest.mark.parametrize(
    ("family", "template"), [("llava", LLAVA), ("llava", SMOLVLM), ("llava_next", None), ("qwen2_5_vl", None)]
)
def test_tool_calls_look_like_an_ordinary_conversation(tiny_vlm: Any, family: str, template: str | None) -> None:
    model, processor = tiny_vlm(family)
    processor.chat_template = template or processor.chat_template
    original = copy.deepcopy(processor)
    _, prepared = prepare_model(model, processor)
    assert supports_tool_calling(prepared)
    answer = {"role": "assistant", "content": [{"type": "text", "text": '{"action": "+"}'}]}
    plain = original.apply_chat_template([user("one"), answer, user("two")], add_generation_prompt=True)
    calls = [user("one"), called('{"action": "+"}'), user("two", role="tool")]
    assert prepared.apply_chat_template(calls, add_generation_prompt=True, tools=[len_of]) == plain
    assert processor.chat_template == original.chat_template  # the given one isn't changed
    twice = prepare_model(model, prepared)[1]
    assert twice.chat_template == prepared.chat_template


def len_of(text: str) -> int:
    """
    The length.

    Args:
        text: Any text.
    """
    return len(text)


def test_every_response_is_a_call_until_the_episode_is_over(tiny: tuple[Any, Any]) -> None:
    _, processor = tiny
    tokenizer = processor.tokenizer
    lies = [f'{{"thoughts": "{words}", "action": "-"}}' for words in (EPISODE_OVER, "The episode is over, or not.")]
    for text in ('{"action": "+"}', " no JSON at all\n", *lies):
        for before in ("", *lies):  # what it wrote earlier
            turns = [user("one"), called(before), user("two", role="tool")] if before else [user("one")]
            prompt = processor.apply_chat_template(turns, add_generation_prompt=True)
            ids = tokenizer(text + "</s>")["input_ids"]
            parsed = parse_response(tokenizer, ids, prefix=tokenizer(prompt)["input_ids"])
            (call,) = parsed["tool_calls"]
            assert call["function"] == {"name": "act", "arguments": {"response": text}}
    over = {"role": "tool", "content": [{"type": "text", "text": EPISODE_OVER}]}
    prompt = processor.apply_chat_template([user("one"), called("x"), over], add_generation_prompt=True)
    parsed = parse_response(tokenizer, tokenizer("bye</s>")["input_ids"], prefix=tokenizer(prompt)["input_ids"])
    assert "tool_calls" not in parsed
    assert parsed["content"].endswith("bye")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ({"default": "a", "other": "b"}, "several chat templates"),
        ("{{ messages[-1]['content'] }}", "the same whatever follows it"),
        ("<image>{% for m in messages %}<{{ m.role }}>{% endfor %}", "leaves out turns"),
        ("<image>{% for m in messages %}<{{ m.role }}>{{ m.content[-1].text }}{% endfor %}", "picture of every turn"),
    ],
)
def test_templates_that_cannot_do_it_are_refused(tiny_vlm: Any, template: Any, message: str) -> None:
    model, processor = tiny_vlm("llava")
    processor.chat_template = template
    with pytest.raises(ValueError, match=message):
        prepare_model(model, processor)


def test_token_types_are_ignored_and_special_tokens_never_sampled() -> None:
    model, processor = load_policy("tiny")
    name, ids = type(model).__name__, torch.tensor([[7, 8, 9]])
    expected = model(input_ids=ids).logits
    prepare_model(model, processor)
    assert torch.equal(model(input_ids=ids, token_type_ids=torch.zeros_like(ids)).logits, expected)
    assert type(model).__name__ == name
    many = ids.repeat(64, 1)
    options = {"token_type_ids": torch.zeros_like(many), "max_new_tokens": 32, "do_sample": True, "temperature": 50.0}
    sampled = model.generate(input_ids=many, **options)
    special = processor.tokenizer.convert_tokens_to_ids(["<image>", "<user>", "<assistant>"])
    assert not {*special} & {*sampled.flatten().tolist()}
    assert processor.tokenizer.eos_token_id in sampled
    assert processor.tokenizer.eos_token_id not in sampled[:, ids.shape[1]]  # no response is empty


def test_grpo_trains_on_whole_episodes(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `examples/trl_grpo.py` does, but smaller."""
    script = example("trl_grpo")
    small = {"per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 1, "max_tool_calling_iterations": 3}
    config = GRPOConfig(**{**script.DEFAULTS, **small, "output_dir": str(tmp_path), "disable_tqdm": True})
    arguments = script.Arguments(task="number_line", model_name_or_path="tiny", starts=2)
    trainer = script.make_trainer(arguments, config)
    generate, seen = trainer._generate, []
    monkeypatch.setattr(trainer, "_generate", lambda prompts: seen.append((prompts, generate(prompts))) or seen[-1][1])
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()

    ((prompts, (prompt_ids, completion_ids, mask, completions, *_)),) = seen
    for prompt, ids, completion, own, messages in zip(
        prompts, prompt_ids, completion_ids, mask, completions, strict=True
    ):
        whole = trainer.processing_class.apply_chat_template([*prompt, *messages])
        read = re.sub("(<image>)+", "<image>", trainer.processing_class.tokenizer.decode([*ids, *completion]))
        assert read == whole  # what it learns from is the conversation, to the letter
        assert len(own) == len(completion)
    returns = [environment.get_reward() for environment in trainer.environments]
    logs = trainer.state.log_history[0]
    assert logs["rewards/TaskEnvironment/mean"] == pytest.approx(sum(returns) / 8)
    assert logs["tools/call_frequency"] >= 1
    assert logs["tools/failure_frequency"] == 0
    assert sorted(environment._begun().index for environment in trainer.environments) == [0] * 4 + [1] * 4
    assert len(set(returns)) > 1  # otherwise nothing would be learned
    assert any(not torch.equal(before[name], weight) for name, weight in trainer.model.state_dict().items())
