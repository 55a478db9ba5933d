import numpy as np
import pytest
import torch
from PIL import Image
from vlms import FAMILIES, some_images, some_prompts

from trl_gtr.policy.loading import chat
from trl_gtr.policy.prompts import PromptEncoder, pad_and_cat


class CountingProcessor:
    """A processor that remembers how many samples it was given."""

    def __init__(self, processor):
        self.processor, self.samples = processor, 0

    def __getattr__(self, name):
        return getattr(self.processor, name)

    def __call__(self, text, **options):
        self.samples += len(text)
        return self.processor(text=text, **options)


@pytest.fixture(scope="module", params=FAMILIES)
def processor(request, tiny_vlm):
    return tiny_vlm(request.param)[1]


def processors_own_batch(processor, prompts, images):
    processor.tokenizer.padding_side = "left"
    return processor(
        text=[chat(processor, prompt) for prompt in prompts],
        images=[[Image.fromarray(image)] for image in images],
        padding=True,
        return_tensors="pt",
    )


def same(first, second):
    return first.keys() == second.keys() and all(
        torch.equal(tensor, second[key]) and tensor.dtype == second[key].dtype for key, tensor in first.items()
    )


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_is_the_processors_own_batch(processor, padding_side):
    prompts, images = some_prompts(8), some_images(8)
    images[4] = images[0][:, ::-1].copy()  # two of one size, with prompts of different lengths
    expected = processors_own_batch(processor, prompts, images)
    processor.tokenizer.padding_side = padding_side
    encoder = PromptEncoder(processor, processor.tokenizer.pad_token_id, 2**30)
    assert same(encoder.encode(prompts, images), expected)
    # from the cache, in another order and with other neighbours
    order = [6, 0, 3]
    some = processors_own_batch(processor, [prompts[i] for i in order], [images[i] for i in order])
    processor.tokenizer.padding_side = padding_side
    assert same(encoder.encode([prompts[i] for i in order], [images[i] for i in order]), some)


def test_each_image_and_each_text_is_processed_once(tiny_vlm):
    processor = CountingProcessor(tiny_vlm()[1])
    encoder = PromptEncoder(processor, 0, 2**30)
    prompts, images = some_prompts(4), some_images(4)
    encoder.encode(prompts, images)
    encoder.encode(prompts * 2, images * 2)
    assert processor.samples == 4
    encoder.encode(["another"], images[:1])
    encoder.encode(prompts[:1], [255 - images[0]])
    assert processor.samples == 6
    encoder.encode(["twice"] * 2, [images[0], images[0].copy()])
    assert processor.samples == 7
    encoder.encode(["another", "twice"], [255 - images[0]] * 2)  # both halves of these pairs are known
    assert processor.samples == 7


def test_an_image_is_kept_once_whatever_is_asked_about_it(processor):
    """Room for three images holds hundreds of samples of them."""
    images, prompts = some_images(3), [f"Formula: {i}" for i in range(100)]
    size = max(
        sum(tensor.nbytes for key, tensor in processors_own_batch(processor, ["x"], [image]).items())
        for image in images
    )
    counting = CountingProcessor(processor)
    encoder = PromptEncoder(counting, processor.tokenizer.pad_token_id, 3 * size + 2**20)
    for prompt in prompts:
        encoder.encode([prompt] * 3, images)
    counting.samples = 0
    for prompt in prompts:
        found = encoder.encode([prompt] * 3, images)
    assert counting.samples == 0
    assert same(found, processors_own_batch(processor, [prompts[-1]] * 3, images))


def test_known_halves_make_the_processors_own_batch(processor):
    """Image and text of a pair that was never processed as a pair."""
    images, prompts = some_images(8), some_prompts(8)
    mirrored = [image[:, ::-1].copy() for image in images]
    counting = CountingProcessor(processor)
    encoder = PromptEncoder(counting, processor.tokenizer.pad_token_id, 2**30)
    encoder.encode(prompts, images)
    encoder.encode(["?"] * 8, mirrored)
    counting.samples = 0
    assert same(encoder.encode(prompts, mirrored), processors_own_batch(processor, prompts, mirrored))
    assert counting.samples == 0


def test_at_least_so_many_tokens(processor):
    encoder = PromptEncoder(processor, processor.tokenizer.pad_token_id, 2**30)
    prompts, images = some_prompts(3), some_images(3)
    lengths = encoder.lengths(prompts, images)
    plain, wide = encoder.encode(prompts, images), encoder.encode(prompts, images, at_least=max(lengths) + 5)
    assert lengths == plain["attention_mask"].sum(1).tolist()
    assert (wide["attention_mask"][:, :5] == 0).all()
    assert (wide["input_ids"][:, :5] == processor.tokenizer.pad_token_id).all()
    for key in ("input_ids", "attention_mask"):
        assert torch.equal(wide[key][:, 5:], plain[key])


def test_same_bytes_in_another_shape_are_another_image(tiny_vlm):
    encoder = PromptEncoder(tiny_vlm()[1], 0, 2**30)
    image = some_images(1)[0]
    turned = image.reshape(image.shape[1], image.shape[0], 3)
    batch = encoder.encode(["x", "x"], [image, turned])
    assert not torch.equal(batch["pixel_values"][0], batch["pixel_values"][1])


def test_cache_is_bounded_and_forgets_the_oldest(tiny_vlm):
    processor = CountingProcessor(tiny_vlm()[1])
    prompts, images = ["same"] * 4, [np.full((56, 56, 3), shade, np.uint8) for shade in range(4)]
    one = PromptEncoder(processor, 0, 2**30).encode(prompts[:1], images[:1])
    size = sum(tensor.nbytes for tensor in one.values())
    text = sum(tensor.nbytes for tensor in one.values() if tensor.dtype == torch.int64)
    encoder = PromptEncoder(processor, 0, 2 * size - text)  # the one text, and two images
    expected = processors_own_batch(processor.processor, prompts, images)
    assert same(encoder.encode(prompts, images), expected)  # a batch larger than the cache
    assert len(encoder._cache) == 3
    processor.samples = 0
    encoder.encode(prompts[2:3], images[2:3])  # now 3 is the oldest
    assert processor.samples == 0
    encoder.encode(prompts[:1], images[:1])
    encoder.encode(prompts[2:3], images[2:3])
    assert processor.samples == 1
    encoder.encode(prompts[3:], images[3:])
    assert processor.samples == 2
    held = sum(t.untyped_storage().nbytes() for features in encoder._cache.values() for t in features.values())
    assert held <= 2 * size - text


def test_without_cache(tiny_vlm):
    processor = CountingProcessor(tiny_vlm()[1])
    encoder = PromptEncoder(processor, 0, 0)
    for _ in range(2):
        encoder.encode(some_prompts(3), some_images(3))
    assert processor.samples == 6


def test_pad_and_cat():
    rows = [torch.tensor([[1, 2, 3]]), torch.tensor([[4]])]
    assert pad_and_cat(rows, 9, left=True).tolist() == [[1, 2, 3], [9, 9, 4]]
    assert pad_and_cat(rows).tolist() == [[1, 2, 3], [4, 0, 0]]
    assert pad_and_cat([torch.ones(2, 1, 3), torch.ones(1, 2, 2)]).sum((1, 2)).tolist() == [3, 3, 4]
    assert pad_and_cat([torch.tensor([1]), torch.tensor([2])], at_least=3).tolist() == [1, 2]
    assert pad_and_cat(rows, 9, left=True, at_least=4).tolist() == [[9, 1, 2, 3], [9, 9, 9, 4]]
