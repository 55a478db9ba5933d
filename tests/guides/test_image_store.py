"""`trl_gtr.guides.image_store`: what goes in comes out, and what nobody holds takes no space."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image, ImageDraw

from trl_gtr.guides.image_store import BLOCK_SIZE, ImageStore


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def smooth(height, width, seed=0):
    """A photo-like view: smooth, and hardly two pixels alike."""
    coarse = Image.fromarray(noise(8, 8, seed)).resize((width, height), Image.Resampling.BICUBIC)
    grain = np.random.default_rng(seed).integers(-2, 3, (height, width, 3))
    return (np.asarray(coarse).astype(int) + grain).clip(0, 255).astype(np.uint8)


def drawn(text):
    canvas = Image.new("RGB", (300, 300), (0, 120, 40))
    ImageDraw.Draw(canvas).text((20, 100), text, fill="white", font_size=60)
    return np.asarray(canvas)


class TestLossless:
    @settings(deadline=None, max_examples=100)
    @given(hnp.arrays(np.uint8, st.tuples(st.integers(1, 20), st.integers(1, 20), st.just(3))))
    def test_small_images(self, image):
        store = ImageStore()
        np.testing.assert_array_equal(store.image(store.hold(image)), image)

    @pytest.mark.parametrize("height", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE])
    @pytest.mark.parametrize("make", [noise, smooth])
    def test_sizes_around_a_block(self, height, make):
        store = ImageStore()
        image = make(height, 2 * BLOCK_SIZE + 7)
        np.testing.assert_array_equal(store.image(store.hold(image)), image)
        assert store.num_bytes < 1.02 * image.size + 300

    def test_a_view_is_an_image(self):
        store = ImageStore()
        image = drawn("4*(10-4)")[::-1, ::2]
        assert not image.flags.c_contiguous
        key = store.hold(image)
        np.testing.assert_array_equal(store.image(key), image)
        assert store.hold(image.copy()) == key

    def test_images_are_copies(self):
        store = ImageStore()
        image = noise(10, 10)
        key = store.hold(image)
        before = image.copy()
        image[:] = 0
        store.image(key)[:] = 1
        np.testing.assert_array_equal(store.image(key), before)

    def test_same_bytes_in_another_shape_are_another_image(self):
        store = ImageStore()
        pixels = noise(4, 6)
        keys = [store.hold(pixels.reshape(shape)) for shape in ((4, 6, 3), (6, 4, 3), (2, 12, 3))]
        assert len(store) == len(set(keys)) == 3
        assert [store.image(key).shape for key in keys] == [(4, 6, 3), (6, 4, 3), (2, 12, 3)]

    @pytest.mark.parametrize("image", [noise(5, 5).astype(float), noise(5, 5)[..., 0], noise(5, 5).transpose(2, 0, 1)])
    def test_other_arrays_raise(self, image):
        with pytest.raises(ValueError, match="uint8"):
            ImageStore().hold(image)


class TestSharing:
    def test_equal_images_are_one(self):
        store = ImageStore()
        keys = {store.hold(drawn("24").copy()) for _ in range(10)}
        assert len(keys) == len(store) == 1

    def test_what_images_share_is_kept_once(self):
        store = ImageStore()
        first = noise(300, 300)
        store.hold(first)
        alone = store.num_bytes
        for shade in range(20):  # twenty new images, all but one corner the same
            changed = first.copy()
            changed[:10, :10] = shade
            store.hold(changed)
        assert len(store) == 21
        one_block = 3 * BLOCK_SIZE**2
        assert alone + 20 * 0.9 * one_block < store.num_bytes < alone + 20 * 1.2 * one_block

    def test_photo_like_views_shrink(self):
        store = ImageStore()
        image = smooth(300, 300)
        store.hold(image)
        assert store.num_bytes < 0.7 * image.size


class TestFreeing:
    def test_the_last_user_frees(self):
        store = ImageStore()
        key = store.hold(drawn("a"))
        store.hold(drawn("a"))
        store.release(key)
        np.testing.assert_array_equal(store.image(key), drawn("a"))
        store.release(key)
        assert (len(store), store.num_bytes, store.blocks) == (0, 0, {})

    def test_shared_blocks_stay_for_the_other_image(self):
        store = ImageStore()
        first, second = drawn("8/(3-8"), drawn("8/(3-7")
        keys = store.hold(first), store.hold(second)
        both = store.num_bytes
        store.release(keys[0])
        np.testing.assert_array_equal(store.image(keys[1]), second)
        only_second = ImageStore()
        only_second.hold(second)
        assert store.blocks == only_second.blocks
        assert store.num_bytes < both

    @settings(deadline=None, max_examples=50)
    @given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=30))
    def test_any_order(self, moves):
        """Four images that share a block; whatever is held can be read, the rest is gone."""
        images = [np.vstack([np.zeros((BLOCK_SIZE, 4, 3), np.uint8), noise(4, 4, seed)]) for seed in range(4)]
        store, held = ImageStore(), []
        for take, which in moves:
            if take:
                held.append((store.hold(images[which]), which))
            elif held:
                key, _ = held.pop(which % len(held))
                store.release(key)
            assert set(store) == {key for key, _ in held}
            for key, index in held:
                np.testing.assert_array_equal(store.image(key), images[index])
            assert len(store.blocks) == (len(set(held)) + 1 if held else 0)

    def test_unknown_key_raises(self):
        with pytest.raises(KeyError):
            ImageStore().release(b"nothing")


def test_restored_store_goes_on():
    store = ImageStore()
    images = [drawn("10"), drawn("11"), noise(20, 20)]
    keys = [store.hold(image) for image in images]
    store.hold(images[0])
    restored = ImageStore.restore({keys[0]: 2, keys[1]: 1, keys[2]: 1}, store.blocks)
    for key, image in zip(keys, images, strict=True):
        np.testing.assert_array_equal(restored.image(key), image)
    assert restored.hold(images[1]) == keys[1]
    for key in (keys[0], keys[0], keys[1], keys[2]):
        restored.release(key)
    assert list(restored) == [keys[1]]
    np.testing.assert_array_equal(restored.image(keys[1]), images[1])
    restored.release(keys[1])
    assert restored.blocks == {}
