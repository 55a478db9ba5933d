"""Prompts with earlier turns and several pictures: what the model is given, and how its responses are scored."""

import copy

import numpy as np
import pytest
import torch
from PIL import Image
from vlms import some_images, some_prompts

from trl_gtr.engines.transformers import TransformersEngine
from trl_gtr.policy.loading import chat
from trl_gtr.policy.network import PolicyWithValue
from trl_gtr.policy.prompts import PromptEncoder
from trl_gtr.policy.scoring import VLMPolicy
from trl_gtr.types import Prompt, Turn, all_pictures, chat_messages

FAMILIES = ["llava", "llava_next", "idefics3", "qwen2_5_vl", "qwen3_vl", "smolvlm"]


@pytest.fixture(scope="module", params=FAMILIES)
def agent(request, tiny_vlm):
    return tiny_vlm(request.param)


def some_chats(number=4):
    """Rows of 1 to 4 pictures of different sizes; the last also has a turn without one."""
    pictures = iter(some_images(20))
    words = some_prompts(12)
    prompts, images = [], []
    for row in range(number):
        turns = [Turn(words[row + i], f"I stand {i}", next(pictures)) for i in range(row)]
        if row == number - 1:
            turns.insert(0, Turn("long ago", "I hit"))
        prompts.append(Prompt(words[row], turns) if turns else words[row])
        images.append(next(pictures))
    return prompts, images


def own_inputs(processor, prompt, image):
    """What the processor makes of one chat, given whole."""
    pictures = all_pictures(prompt, image)
    text = chat(processor, prompt, len(pictures))
    return processor(text=[text], images=[[Image.fromarray(each) for each in pictures]], return_tensors="pt")


def test_the_messages_of_a_chat():
    first, second = some_images(2)
    prompt = Prompt("now?", [Turn("what?", "that", first), Turn("and?", "this")])
    assert prompt == "now?"
    assert [id(each) for each in all_pictures(prompt, second)] == [id(first), id(second)]
    picture, text = {"type": "image"}, lambda words: {"type": "text", "text": words}
    assert chat_messages(prompt, [picture] * 2) == [
        {"role": "user", "content": [picture, text("what?")]},
        {"role": "assistant", "content": [text("that")]},
        {"role": "user", "content": [text("and?")]},
        {"role": "assistant", "content": [text("this")]},
        {"role": "user", "content": [picture, text("now?")]},
    ]
    assert copy.deepcopy(prompt).history[0].response == "that"


def test_tokens_are_the_processors_own(agent):
    _, processor = agent
    encoder = PromptEncoder(processor, processor.tokenizer.pad_token_id, 2**30)
    prompts, images = some_chats()
    batch = encoder.encode(prompts, images)
    for row, (prompt, image) in enumerate(zip(prompts, images, strict=True)):
        own = own_inputs(processor, prompt, image)
        length = own["input_ids"].shape[1]
        assert encoder.lengths([prompt], [image]) == [length]
        assert torch.equal(batch["input_ids"][row, -length:], own["input_ids"][0])
        assert batch["attention_mask"][row].sum() == length


@torch.no_grad()
def test_batched_scores_equal_a_plain_forward_of_each_chat(agent):
    model, processor = agent
    policy = VLMPolicy(model, processor, temperature=1.0)
    prompts, images = some_chats()
    responses = [policy.encode_response(f"stand {'!' * i}") for i in range(4)]
    policy.encoder.encode(prompts[::-1], images[::-1])  # whatever was cached before, and in which order
    logprobs, mask = policy.score_tokens(PolicyWithValue(model, None), prompts, images, responses)
    for row, (prompt, image, ids) in enumerate(zip(prompts, images, responses, strict=True)):
        inputs = own_inputs(processor, prompt, image)
        length, more = inputs["input_ids"].shape[1], torch.as_tensor(ids)[None]
        inputs["input_ids"] = torch.cat([inputs["input_ids"], more], 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if "mm_token_type_ids" in inputs:
            inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(more)], 1)
        logits = model(**inputs).logits[0, length - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, more.T)[:, 0]
        assert (logprobs[row][mask[row]] - expected).abs().max() < 1e-4
    # every picture matters, also the oldest
    other = Prompt(prompts[3], [prompts[3].history[0], *prompts[2].history[:1], *prompts[3].history[2:]])
    changed, _ = policy.score_tokens(PolicyWithValue(model, None), [other], images[3:], responses[3:])
    assert (changed[0] - logprobs[3][mask[3]]).abs().max() > 1e-3


@torch.no_grad()
def test_a_batch_generates_what_each_chat_does_alone(agent):
    model, processor = agent
    engine = TransformersEngine(VLMPolicy(model, processor, temperature=1.0, max_completion_length=4), model)
    prompts, images = some_chats()
    together = engine.generate(prompts, images, greedy=True)
    alone = [engine.generate([prompt], [image], greedy=True)[0] for prompt, image in zip(prompts, images, strict=True)]
    assert [each.ids.tolist() for each in together] == [each.ids.tolist() for each in alone]


def test_each_picture_is_processed_once(tiny_vlm):
    """An episode of eight steps that shows four pictures at a time."""
    processor = tiny_vlm("llava_next")[1]
    counted = copy.copy(processor)
    counted.image_processor = copy.copy(processor.image_processor)
    seen = []

    def preprocess(images, *args, **options):
        seen.extend(np.asarray(each).tobytes() for sample in images for each in sample)
        return processor.image_processor.preprocess(images, *args, **options)

    counted.image_processor.preprocess = preprocess
    encoder = PromptEncoder(counted, 0, 2**30)

    def play(pictures):
        for step, picture in enumerate(pictures):
            past = [Turn("?", "!", each) for each in pictures[max(0, step - 3) : step]]
            encoder.encode([Prompt("?", past) if past else "?"], [picture])

    first, second = ([np.full((60, 80, 3), shade + i, np.uint8) for i in range(8)] for shade in (0, 100))
    play(first)
    seen.clear()  # token counts of the first chats with two, three and four pictures were asked of the processor
    play(second)
    assert len(seen) == len(set(seen)) == 8


def test_several_pictures_of_one_step(agent):
    _, processor = agent
    encoder = PromptEncoder(processor, processor.tokenizer.pad_token_id, 2**30)
    pictures = tuple(some_images(3))
    own = own_inputs(processor, "Compare.", pictures)
    assert torch.equal(encoder.encode(["Compare."], [pictures])["input_ids"], own["input_ids"])


class TestWhatIsRefused:
    def test_families_that_can(self, agent):
        PromptEncoder(agent[1], 0, 2**30).check_history(with_images=True)

    def test_a_family_that_treats_several_pictures_differently(self, tiny_vlm):
        encoder = PromptEncoder(tiny_vlm("llava_onevision")[1], 0, 2**30)
        encoder.check_history(with_images=False)
        with pytest.raises(ValueError, match=r"differently if the chat has several.*history_images=0"):
            encoder.check_history(with_images=True)

    @pytest.mark.parametrize(
        "template", ["{{ messages[-1].content[1].text }}<image>", "{{ raise_exception('one turn only') }}"]
    )
    def test_a_template_without_earlier_turns(self, tiny_vlm, template):
        processor = tiny_vlm()[1]
        processor.chat_template = template
        with pytest.raises(ValueError, match=r"earlier turns.*history_turns"):
            PromptEncoder(processor, 0, 2**30).check_history(with_images=True)

    def test_a_template_that_shows_only_one_picture(self, tiny_vlm):
        processor = tiny_vlm()[1]
        processor.chat_template = (
            "<image>{% for m in messages %}{% for part in m.content if part.type == 'text' %}{{ part.text }}"
            "{% endfor %}{% endfor %}"
        )
        with pytest.raises(ValueError, match=r"leaves out the images of earlier turns.*history_images"):
            PromptEncoder(processor, 0, 2**30).check_history(with_images=True)

    def test_a_prompt_that_is_too_long(self, tiny_vlm):
        model, processor = tiny_vlm()
        policy = VLMPolicy(model, processor, temperature=1.0, max_completion_length=100)
        policy.max_length = 400
        image = some_images(1)[0]
        policy.check_history(Prompt("?", [Turn("?", "", image)]), image)
        with pytest.raises(ValueError, match=r"history_turns=3 and history_images=1.*max_comple.*takes 400"):
            policy.check_history(Prompt("?", [Turn("?", ""), Turn("?", ""), Turn("?", "", image)]), image)
