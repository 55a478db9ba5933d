"""`trl_gtr.guides.buffer`: what the correction buffer keeps and draws."""

import io
import tracemalloc

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from trl_gtr.guides.buffer import CorrectionBuffer
from trl_gtr.types import Prompt, Turn, all_pictures


def flat_image(shade, size=8):
    return np.full((size, size, 3), shade, np.uint8)


def card_table(seed):
    """A drawn hand of four cards, like those of the card games."""
    rng = np.random.default_rng(seed)
    canvas = Image.new("RGB", (300, 300), (0, 120, 40))
    draw = ImageDraw.Draw(canvas)
    for i in range(4):
        left = 10 + 72 * i
        draw.rounded_rectangle((left, 60, left + 64, 160), 8, fill="white", outline="black")
        ink = "red" if rng.random() < 0.5 else "black"
        draw.text((left + 15, 75), str(rng.integers(1, 14)), fill=ink, font_size=40)
    draw.text((10, 220), f"Formula: ({rng.integers(1, 10)}+{rng.integers(1, 10)})*", fill="white", font_size=28)
    return np.asarray(canvas)


def number_of(sample):
    """The number that `fill` wrote into a sample, checked on all of its parts."""
    number = int(sample.target_ids[0])
    assert sample.target_ids.tolist() == [number, number + 1, number + 2]
    assert sample.prompt == f"prompt {number % 5}"
    assert (sample.image == number % 7).all()
    assert (sample.num_labels, sample.update) == (2, number // 10)
    return number


def fill(buffer, numbers):
    for i in numbers:
        buffer.add(
            prompt=f"prompt {i % 5}",
            image=flat_image(i % 7),
            target_ids=[i, i + 1, i + 2],
            num_labels=2,
            update=i // 10,
        )


class TestKeeping:
    def test_everything_comes_back_as_it_went_in(self):
        buffer = CorrectionBuffer(capacity=100, seed=0)
        fill(buffer, range(40))
        samples = buffer.sample(400)
        assert {number_of(sample) for sample in samples} == set(range(40))  # corrections of all updates, old and new
        assert samples[0].target_ids.dtype == np.int64
        assert samples[0].image.dtype == np.uint8

    def test_samples_are_uniform_over_the_buffer(self):
        buffer = CorrectionBuffer(capacity=100, seed=1)
        fill(buffer, range(20))
        counts = np.bincount([number_of(sample) for sample in buffer.sample(4000)], minlength=20)
        # χ² with 19 degrees of freedom exceeds 43.8 once in a thousand
        assert ((counts - 200) ** 2 / 200).sum() < 43.8

    def test_full_buffer_is_a_uniform_reservoir(self):
        """Each of 60 corrections is kept with probability 12/60, wherever in the run it came."""
        kept = np.zeros(60)
        for seed in range(500):
            buffer = CorrectionBuffer(capacity=12, seed=seed)
            fill(buffer, range(60))
            assert len(buffer) == 12
            state = buffer.state_dict()
            kept[state["target_ids"].view("<i4")[::3]] += 1
        assert kept.sum() == 500 * 12
        # χ² with 59 degrees of freedom; a count's variance is n·p·(1−p); 98.3 is exceeded once in a thousand
        assert ((kept - 100) ** 2 / (500 * 0.2 * 0.8)).sum() * 59 / 60 < 98.3

    def test_reservoir_of_one(self):
        """One place, three corrections, a third each: any off-by-one shows here."""
        kept = np.zeros(3)
        for seed in range(3000):
            buffer = CorrectionBuffer(capacity=1, seed=seed)
            fill(buffer, range(3))
            kept[number_of(buffer.sample(1)[0])] += 1
        # χ² with 2 degrees of freedom exceeds 13.8 once in a thousand
        assert ((kept - 1000) ** 2 / 1000).sum() < 13.8

    def test_num_added_counts_what_was_dropped(self):
        buffer = CorrectionBuffer(capacity=3, seed=0)
        fill(buffer, range(10))
        assert (len(buffer), buffer.num_added) == (3, 10)

    def test_the_buffer_has_its_own_generator(self):
        def draw(noise):
            buffer = CorrectionBuffer(capacity=10, seed=5)
            fill(buffer, range(30))
            if noise:
                np.random.default_rng().random()
                torch.rand(3)
            return [number_of(sample) for sample in buffer.sample(50)]

        assert draw(noise=False) == draw(noise=True)
        other = CorrectionBuffer(capacity=10, seed=6)
        fill(other, range(30))
        assert [number_of(sample) for sample in other.sample(50)] != draw(noise=False)

    def test_caller_may_reuse_its_arrays(self):
        buffer = CorrectionBuffer(capacity=1, seed=0)
        image, ids = flat_image(3), np.array([4, 5, 6])
        buffer.add("p", image, ids, num_labels=3)
        image[:], ids[:] = 9, 9
        (sample,) = buffer.sample(1)
        assert (sample.image == 3).all()
        assert sample.target_ids.tolist() == [4, 5, 6]
        sample.image[:] = 1  # its own, writable copy
        sample.target_ids[:] = 1
        (again,) = buffer.sample(1)
        assert (again.image == 3).all()
        assert again.target_ids.tolist() == [4, 5, 6]

    def test_misuse_raises(self):
        with pytest.raises(ValueError, match="at least one"):
            CorrectionBuffer(capacity=0, seed=0)
        buffer = CorrectionBuffer(capacity=2, seed=0)
        with pytest.raises(ValueError, match="empty"):
            buffer.sample(1)
        for ids, labels in (([1, 2], 0), ([1, 2], 3), ([], 0), ([[1, 2]], 1)):
            with pytest.raises(ValueError, match="labels"):
                buffer.add("p", flat_image(0), ids, labels)
        for image in (flat_image(0).astype(np.float32), flat_image(0)[..., 0], np.zeros((3, 8, 8), np.uint8)):
            with pytest.raises(ValueError, match="uint8"):
                buffer.add("p", image, [1], 1)
        assert (len(buffer), buffer.num_added, buffer.num_images) == (0, 0, 0)


class TestImages:
    def test_each_distinct_image_is_stored_once(self):
        buffer = CorrectionBuffer(capacity=1000, seed=0)
        fill(buffer, range(700))
        assert buffer.num_images == 7

    def test_last_sample_frees_its_image(self):
        buffer = CorrectionBuffer(capacity=2, seed=0)
        fill(buffer, range(500))
        held = {number_of(sample) % 7 for sample in buffer.sample(100)}
        assert buffer.num_images == len(held) <= 2
        one = CorrectionBuffer(capacity=1, seed=0)
        for shade in range(100):
            one.add("p", flat_image(shade), [1], 1)
            assert one.num_images == 1

    def test_shared_image_stays_until_its_last_user_goes(self):
        buffer = CorrectionBuffer(capacity=3, seed=0)
        for _ in range(3):
            buffer.add("p", flat_image(1), [1], 1)
        replaced = 0
        while replaced < 3:  # the newcomers replace the old samples one by one
            buffer.add("p", flat_image(2), [2], 1)
            replaced = buffer.state_dict()["target_ids"].view("<i4").tolist().count(2)
            shades = {int(sample.image[0, 0, 0]) for sample in buffer.sample(60)}
            assert shades == ({1, 2} if 0 < replaced < 3 else {2} if replaced else {1})
            assert buffer.num_images == len(shades)

    def test_memory_per_step(self):
        """300 MB for 15,000 steps is 20 KB a step, every image new; a fifth is enough. (As arrays: 270 KB each.)"""
        images = [card_table(seed) for seed in range(200)]
        prompt = "Make 24 with these cards. " * 40
        tracemalloc.start()
        try:
            buffer = CorrectionBuffer(capacity=1000, seed=0)
            for i, image in enumerate(images):
                buffer.add(prompt + str(i), image, np.arange(120), num_labels=100)
            used, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert buffer.num_images > 190
        assert used / len(images) < 4000
        assert buffer.image_bytes < used  # and the account that the buffer gives of itself is about right
        assert used - buffer.image_bytes < 2500 * len(images)


class TestState:
    def through_numpy(self, state):
        file = io.BytesIO()
        np.savez(file, **state)
        file.seek(0)
        return dict(np.load(file, allow_pickle=False))

    def through_torch(self, state):
        file = io.BytesIO()
        torch.save({name: torch.from_numpy(value) for name, value in state.items()}, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    @pytest.mark.parametrize("offered", [0, 7, 12, 300])
    @pytest.mark.parametrize("store", ["through_numpy", "through_torch"])
    def test_resumed_buffer_goes_on_exactly(self, offered, store):
        buffer = CorrectionBuffer(capacity=12, seed=3)
        fill(buffer, range(offered))
        if offered:
            buffer.sample(5)  # the generator is somewhere in its stream
        resumed = CorrectionBuffer(capacity=12, seed=99)
        fill(resumed, range(5))  # is thrown away
        resumed.load_state_dict(getattr(self, store)(buffer.state_dict()))
        assert len(resumed) == len(buffer)
        for one in (buffer, resumed):
            fill(one, range(offered, offered + 40))
        drawn = [[number_of(sample) for sample in one.sample(100)] for one in (buffer, resumed)]
        assert drawn[0] == drawn[1]
        assert len(set(drawn[0])) > 5
        assert (resumed.num_added, resumed.num_images) == (buffer.num_added, buffer.num_images)
        assert resumed.image_bytes == buffer.image_bytes

    def test_odd_prompts(self):
        prompts = ["", "naïve ♠ 你好 🂡", "line\nbreak\0", "\ud800 alone"]
        buffer = CorrectionBuffer(capacity=10, seed=0)
        for prompt in prompts:
            buffer.add(prompt, flat_image(0), [1], 1)
        resumed = CorrectionBuffer(capacity=10, seed=0)
        resumed.load_state_dict(self.through_numpy(buffer.state_dict()))
        assert {sample.prompt for sample in resumed.sample(100)} == set(prompts)

    def test_other_capacity_raises(self):
        with pytest.raises(ValueError, match="correction_buffer_size"):
            CorrectionBuffer(capacity=5, seed=0).load_state_dict(CorrectionBuffer(capacity=6, seed=0).state_dict())


class TestEarlierTurns:
    """An episode in which every step sees the last three again, two of them with their picture."""

    def add_episode(self, buffer, length=6):
        for step in range(length):
            turns = [
                Turn("Look.", f"answer {i}", flat_image(i) if i >= step - 2 else None)
                for i in range(max(0, step - 3), step)
            ]
            prompt = Prompt("Look.", turns) if turns else "Look."
            buffer.add(prompt, flat_image(step), [step, 1], num_labels=1)

    def check(self, sample):
        step = int(sample.target_ids[0])
        turns = sample.prompt.history if step else ()
        assert [turn.response for turn in turns] == [f"answer {i}" for i in range(max(0, step - 3), step)]
        shades = [None if turn.image is None else int(turn.image[0, 0, 0]) for turn in turns]
        assert shades == [i if i >= step - 2 else None for i in range(max(0, step - 3), step)]
        assert (sample.image == step).all()
        return step

    def test_come_back_and_each_picture_is_stored_once(self):
        buffer = CorrectionBuffer(capacity=100, seed=0)
        self.add_episode(buffer)
        assert [self.check(sample) for sample in buffer.samples()] == list(range(6))
        assert buffer.num_images == 6  # shown fifteen times

    def test_survive_a_checkpoint_and_are_freed_with_their_last_sample(self):
        buffer, restored = CorrectionBuffer(capacity=6, seed=0), CorrectionBuffer(capacity=6, seed=0)
        self.add_episode(buffer)
        restored.load_state_dict({name: torch.from_numpy(array) for name, array in buffer.state_dict().items()})
        assert [self.check(sample) for sample in restored.samples()] == list(range(6))
        assert restored.num_images == 6
        for each in (buffer, restored):
            for i in range(200):  # replaces all but a few of the samples, and in the end all
                each.add("other", flat_image(99), [7, 1], num_labels=1, update=i)
        assert [sample.update for sample in restored.samples()] == [sample.update for sample in buffer.samples()]
        assert restored.num_images == buffer.num_images
        left = [sample for sample in buffer.samples() if sample.prompt == "Look."]
        shown = {each.tobytes() for sample in left for each in all_pictures(sample.prompt, sample.image)}
        assert buffer.num_images == len(shown) + 1

    def test_a_state_without_them_has_no_such_arrays(self):
        buffer = CorrectionBuffer(capacity=6, seed=0)
        fill(buffer, range(5))
        assert not [name for name in buffer.state_dict() if "turn" in name]
