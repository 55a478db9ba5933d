import numpy as np
import pytest
import torch
from PIL import Image
from vlms import FAMILIES, some_images, some_prompts

from trl_gtr.models import chat
from trl_gtr.prompt_encoding import PromptEncoder, pad_and_cat


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


def test_each_pair_is_processed_once(tiny_vlm):
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
    encoder = PromptEncoder(processor, 0, 2 * size)
    expected = processors_own_batch(processor.processor, prompts, images)
    assert same(encoder.encode(prompts, images), expected)  # a batch larger than the cache
    assert len(encoder._cache) == 2
    processor.samples = 0
    encoder.encode(prompts[2:3], images[2:3])  # now 3 is the oldest
    assert processor.samples == 0
    encoder.encode(prompts[:1], images[:1])
    encoder.encode(prompts[2:3], images[2:3])
    assert processor.samples == 1
    encoder.encode(prompts[3:], images[3:])
    assert processor.samples == 2
    held = sum(t.untyped_storage().nbytes() for sample in encoder._cache.values() for t in sample.values())
    assert held <= 2 * size


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
    assert pad_and_cat([torch.tensor([1]), torch.tensor([2])]).tolist() == [1, 2]
