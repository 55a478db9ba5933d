import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_utils import make_flat_list_of_images
from vlms import FAMILIES, some_images, some_prompts

from trl_gtr.policy.loading import chat
from trl_gtr.policy.prompts import PromptEncoder, pad_and_cat


class Counting:
    """A copy of a processor that counts the images which its image processor is given."""

    def __init__(self, processor):
        self.images = 0
        self.processor = copy.copy(processor)
        self.processor.image_processor = copy.copy(processor.image_processor)
        self.processor.image_processor.preprocess = self.preprocess
        self.real = processor.image_processor.preprocess

    def preprocess(self, images, *args, **options):
        self.images += len(make_flat_list_of_images(images))
        return self.real(images, *args, **options)

    def encoder(self, cache_bytes=2**30):
        return PromptEncoder(self.processor, self.processor.tokenizer.pad_token_id, cache_bytes)


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


def test_each_image_is_processed_once(processor):
    counting = Counting(processor)
    encoder = counting.encoder()
    prompts, images = some_prompts(4), some_images(4)
    encoder.encode(prompts, images)
    encoder.encode(prompts * 2, images * 2)
    assert counting.images == 4
    encoder.encode(["another"], images[:1])
    assert counting.images == 4
    encoder.encode(prompts[:1], [255 - images[0]])
    assert counting.images == 5
    encoder.encode(["twice"] * 2, [images[0], images[0].copy()])
    encoder.encode(["another", "twice"], [255 - images[0]] * 2)
    assert counting.images == 5
    encoder.encode(["one", "two"], [255 - images[1]] * 2)  # both prompts and the image are new
    assert counting.images == 6


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_a_new_prompt_about_known_images_is_the_processors_own_batch(processor, padding_side):
    """Images of several sizes, of which the encoder first saw several at once, or one."""
    counting = Counting(processor)
    encoder = counting.encoder()
    images = some_images(8)
    images += [255 - image for image in images[:4]]
    encoder.encode(["?"] * 12, images)
    counting.images = 0
    prompts = [f"{prompt} Think of <image> and </s>." for prompt in some_prompts(12)]
    expected = processors_own_batch(processor, [encoder._plain(prompt) for prompt in prompts], images)
    processor.tokenizer.padding_side = padding_side
    assert same(encoder.encode(prompts, images), expected)
    assert counting.images == 0
    assert processor.image_processor.preprocess.__self__ is processor.image_processor  # the processor is as it was


def test_a_processor_of_another_kind_processes_the_image_again(tiny_vlm):
    """One that does not ask `image_processor.preprocess`: nothing is left out, and nothing is wrong."""
    processor = tiny_vlm()[1]

    class Other(type(processor)):
        def __call__(self, *args, **options):
            return processor(*args, **options)

    other = copy.copy(processor)
    other.__class__ = Other
    encoder = PromptEncoder(other, processor.tokenizer.pad_token_id, 2**30)
    prompts, images = some_prompts(3), some_images(3)
    encoder.encode(["?"] * 3, images)
    assert same(encoder.encode(prompts, images), processors_own_batch(processor, prompts, images))


def test_an_image_is_kept_once_whatever_is_asked_about_it(processor):
    """Room for three images holds hundreds of samples of them."""
    images, prompts = some_images(3), [f"Formula: {i}" for i in range(100)]
    size = max(
        sum(tensor.nbytes for key, tensor in processors_own_batch(processor, ["x"], [image]).items())
        for image in images
    )
    counting = Counting(processor)
    encoder = counting.encoder(3 * size + 2**20)
    for prompt in prompts:
        encoder.encode([prompt] * 3, images)
    counting.images = 0
    for prompt in prompts:
        found = encoder.encode([prompt] * 3, images)
    assert counting.images == 0
    assert same(found, processors_own_batch(processor, [prompts[-1]] * 3, images))


def test_known_halves_make_the_processors_own_batch(processor):
    """Image and text of a pair that was never processed as a pair."""
    images, prompts = some_images(8), some_prompts(8)
    mirrored = [image[:, ::-1].copy() for image in images]
    counting = Counting(processor)
    encoder = counting.encoder()
    encoder.encode(prompts, images)
    encoder.encode(["?"] * 8, mirrored)
    counting.images = 0
    assert same(encoder.encode(prompts, mirrored), processors_own_batch(processor, prompts, mirrored))
    assert counting.images == 0


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
    counting = Counting(tiny_vlm()[1])
    prompts, images = ["same"] * 4, [np.full((56, 56, 3), shade, np.uint8) for shade in range(4)]
    one = counting.encoder().encode(prompts[:1], images[:1])
    size = sum(tensor.nbytes for tensor in one.values())
    text = sum(tensor.nbytes for tensor in one.values() if tensor.dtype == torch.int64)
    encoder = counting.encoder(2 * size - text)  # the one text, and two images
    expected = processors_own_batch(counting.processor, prompts, images)
    assert same(encoder.encode(prompts, images), expected)  # a batch larger than the cache
    assert len(encoder._cache) == 3
    counting.images = 0
    encoder.encode(prompts[2:3], images[2:3])  # now 3 is the oldest
    assert counting.images == 0
    encoder.encode(prompts[:1], images[:1])
    encoder.encode(prompts[2:3], images[2:3])
    assert counting.images == 1
    encoder.encode(prompts[3:], images[3:])
    assert counting.images == 2
    held = sum(t.untyped_storage().nbytes() for features in encoder._cache.values() for t in features.values())
    assert held <= 2 * size - text


def test_without_cache(tiny_vlm):
    counting = Counting(tiny_vlm()[1])
    encoder = counting.encoder(0)
    for _ in range(2):
        encoder.encode(some_prompts(3), some_images(3))
    assert counting.images == 6


def test_pad_and_cat():
    rows = [torch.tensor([[1, 2, 3]]), torch.tensor([[4]])]
    assert pad_and_cat(rows, 9, left=True).tolist() == [[1, 2, 3], [9, 9, 4]]
    assert pad_and_cat(rows).tolist() == [[1, 2, 3], [4, 0, 0]]
    assert pad_and_cat([torch.ones(2, 1, 3), torch.ones(1, 2, 2)]).sum((1, 2)).tolist() == [3, 3, 4]
    assert pad_and_cat([torch.tensor([1]), torch.tensor([2])], at_least=3).tolist() == [1, 2]
    assert pad_and_cat(rows, 9, left=True, at_least=4).tolist() == [[9, 1, 2, 3], [9, 9, 9, 4]]


class Watched(Counting):
    """Tells when an image is being processed, and waits for `go_on`."""

    def __init__(self, processor):
        super().__init__(processor)
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.inside, self.most_inside = 0, 0

    def preprocess(self, images, *args, **options):
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        self.begun.set()
        assert self.go_on.wait(timeout=20)
        try:
            return super().preprocess(images, *args, **options)
        finally:
            self.inside -= 1


def test_what_is_cached_need_not_wait_for_what_another_thread_prepares(tiny_vlm):
    processor = tiny_vlm("llava_next")[1]
    watched = Watched(processor)
    encoder, prompts, images = watched.encoder(), some_prompts(6), some_images(6)
    watched.go_on.set()
    encoder.prepare(prompts[:3], images[:3])
    assert watched.images == 3
    watched.begun.clear(), watched.go_on.clear()
    thread = threading.Thread(target=encoder.prepare, args=(prompts[3:], images[3:]))
    thread.start()
    assert watched.begun.wait(timeout=20)
    assert same(encoder.encode(prompts[:3], images[:3]), processors_own_batch(processor, prompts[:3], images[:3]))
    watched.go_on.set()
    thread.join()
    assert same(encoder.encode(prompts[3:], images[3:]), processors_own_batch(processor, prompts[3:], images[3:]))
    assert watched.images == 6  # all of them ahead
    PromptEncoder(watched.processor, 0, 0).prepare(["?"], [255 - images[0]])  # no cache, nothing to prepare
    assert watched.images == 6


def test_threads_encode_the_same_as_one(tiny_vlm):
    """With room for a few images only: each evicts what the other has cached, and one processes at a time."""
    processor = tiny_vlm("llava_next")[1]
    watched = Watched(processor)
    watched.go_on.set()
    encoder, prompts, images = watched.encoder(), some_prompts(6), some_images(6)
    expected = [encoder.encode([prompt], [image]) for prompt, image in zip(prompts, images, strict=True)]
    encoder.cache_bytes = encoder._cached_bytes // 2

    def encode(seed):
        for i in np.random.default_rng(seed).integers(6, size=30):
            assert same(encoder.encode([prompts[i]], [images[i]]), expected[i])

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(encode, range(2)))
    assert watched.most_inside == 1
    assert watched.images > 12
    kept = sum(tensor.nbytes for features in encoder._cache.values() for tensor in features.values())
    assert encoder._cached_bytes == kept <= encoder.cache_bytes
