import base64
import json
import random
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tokenizer_cases import mistral, package_data, sentencepiece_like
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
)
from vlms import byte_level_tokenizer, character_tokenizer

from trl_gtr.policy.spans import SpanFinder

KEY = '"action"'
WORDS = [
    "the sum is 12",
    "é",
    "日本語",
    "😀",
    "𝔘𝔫𝔦",
    "naïve",
    " ",
    "\n",
    '\\"',
    "½",
    "Ωmega",
    "{",
    "}",
    "♠K",
    "\u200d",
]


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece", "characters", "mistral"])
def tokenizer(request, tmp_path_factory):
    return {
        "byte_level": byte_level_tokenizer,
        "sentencepiece": sentencepiece_like,
        "characters": lambda: character_tokenizer(['{"thoughts": "', '", "action": "', '"}']),
        "mistral": lambda: mistral(tmp_path_factory.mktemp("mistral")),
    }[request.param]()


def random_thought(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(6)))


class TestEncodedText:
    """Oracle: the offsets that the tokenizers library reports while it encodes."""

    def test_action_start(self, tokenizer):
        finder, rng = SpanFinder(tokenizer), random.Random(0)
        for _ in range(300):
            text = f'{{"thoughts": "{random_thought(rng)}",{rng.choice(["", " ", "  "])}"action": "stand"}}'
            encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
            key = text.index(KEY)
            expected = next(i for i, (_, end) in enumerate(offsets) if end > key)
            assert tokenizer.unk_token_id in ids or finder.text(ids) == tokenizer.decode(ids, skip_special_tokens=True)
            start = finder.text(ids).index(KEY)
            ids = [*ids, tokenizer.eos_token_id]
            assert finder.action_start(ids, (start, start + 5)) == expected

    def test_pieces_that_were_encoded_apart(self, tokenizer):
        """What a model samples is seldom what the tokenizer would have made of the same text."""
        finder, rng = SpanFinder(tokenizer), random.Random(1)
        for _ in range(300):
            before = [tokenizer.encode(random_thought(rng), add_special_tokens=False) for _ in range(3)]
            last = rng.choice(['a"action"', 'x", "action"', '"}"action":'])
            encoding = tokenizer(last, add_special_tokens=False, return_offsets_mapping=True)
            key = next(i for i, (_, end) in enumerate(encoding["offset_mapping"]) if end > last.index(KEY))
            ids = [*chain(*before), *encoding["input_ids"]]
            found = finder.first_token(ids, finder.text(ids).index(KEY))
            assert found == len(ids) - len(encoding["input_ids"]) + key

    def test_truncated(self, tokenizer):
        finder = SpanFinder(tokenizer)
        text = '{"thoughts": "日本 😀 é", "action": "日本 😀"}'
        ids = tokenizer.encode(text, add_special_tokens=False)
        key = finder.text(ids).index(KEY)
        start = finder.first_token(ids, key)
        for length in range(len(ids)):
            read = finder.text(ids[:length])
            if KEY in read:
                assert read.index(KEY) == key
                assert finder.first_token(ids[:length], key) == start
            else:
                assert finder.action_start(ids[:length], None) == length


class TestRandomIds:
    """Oracle: the bytes of each token from a source of its own, and every ASCII character of the text.

    No broken multi-byte character can swallow an ASCII byte, so the n-th ASCII character stands for the n-th byte
    below 128.
    """

    @staticmethod
    def check(finder, bytes_of, ids_to_draw, skip_first_space, samples=300):
        rng = random.Random(3)
        for _ in range(samples):
            ids = rng.choices(ids_to_draw, k=rng.randrange(1, 25))
            raw = b"".join(bytes_of(i) for i in ids)
            skip = int(skip_first_space and raw.startswith(b" "))
            owners = [index for index, token in enumerate(ids) for _ in bytes_of(token)]
            expected = [owners[at] for at in range(skip, len(raw)) if raw[at] < 128]
            text = finder.text(ids)
            found = [finder.first_token(ids, at) for at, char in enumerate(text) if ord(char) < 128]
            assert found == expected
            if raw.isascii():
                assert text == raw[skip:].decode()

    def test_trained_byte_level(self):
        tokenizer = byte_level_tokenizer()
        alphabet = {}  # stand-in → byte, learned from the library by showing it every character of 1 to 4 bytes
        splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        for char in [
            *map(chr, range(0x800)),
            *map(chr, range(0x800, 0xD800, 64)),
            *map(chr, range(0x10000, 0x10FFFF, 4096)),
        ]:
            ((standins, _),) = splitter.pre_tokenize_str(char)
            alphabet |= dict(zip(standins, char.encode(), strict=True))
        special = set(tokenizer.all_special_ids)
        pieces = {i: piece for piece, i in tokenizer.get_vocab().items()}
        drawn = [i for i, p in pieces.items() if i in special or all(c in alphabet for c in p)]
        assert len(drawn) > 300

        def bytes_of(i):
            return b"" if i in special else bytes(alphabet[c] for c in pieces[i])

        # <|user|> and the like are special tokens of the vocabulary though not among all_special_ids
        drawn = [i for i in drawn if i in special or not pieces[i].startswith("<|")]
        self.check(SpanFinder(tokenizer), bytes_of, drawn, skip_first_space=False)

    def test_real_byte_level_vocabulary(self):
        """Mistral's Tekken file names the bytes of its 150,000 tokens."""
        file = json.loads(package_data("mistral_common", "data", "tekken_240718.json").read_text())
        raw = [base64.b64decode(entry["token_bytes"]) for entry in file["vocab"][:60000]]
        standin = [piece for piece, _ in sorted(byte_stand_ins().items(), key=lambda item: item[1])]
        vocabulary = {"".join(standin[byte] for byte in token): i for i, token in enumerate(raw)}
        backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        backend.decoder = decoders.ByteLevel()
        finder = SpanFinder(PreTrainedTokenizerFast(tokenizer_object=backend))
        self.check(finder, raw.__getitem__, range(len(raw)), skip_first_space=False)

    def test_real_mistral_vocabulary(self, tmp_path):
        """SentencePiece's own library tells where each piece lies in the text."""
        sentencepiece = pytest.importorskip("sentencepiece")
        finder = SpanFinder(mistral(tmp_path))
        reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))

        def bytes_of(i):
            if reference.is_control(i) or reference.is_unknown(i):
                return b""
            if reference.is_byte(i):
                return bytes.fromhex(reference.id_to_piece(i)[3:5])
            return reference.decode([reference.piece_to_id("a"), i]).encode()[1:]

        # random ids with many byte pieces among them
        drawn = [*range(reference.vocab_size()), *list(range(3, 259)) * 40]
        self.check(finder, bytes_of, drawn, skip_first_space=True)


def byte_stand_ins() -> dict[str, int]:
    """OpenAI's published rule: printable Latin-1 bytes stand for themselves, the others for U+0100 and up in order."""
    own = [b for b in range(256) if (33 <= b <= 126) or (161 <= b <= 172) or b >= 174]
    return {chr(b): b for b in own} | {chr(256 + n): b for n, b in enumerate(sorted(set(range(256)) - set(own)))}


def test_special_tokens_have_no_text():
    tokenizer = byte_level_tokenizer(["<image>"])
    image, end = tokenizer.convert_tokens_to_ids(["<image>", "</s>"])
    a, b = tokenizer.encode("a") + tokenizer.encode("b")
    finder = SpanFinder(tokenizer)
    assert finder.text([image, a, image, b, end, end]) == "ab"
    assert finder.first_token([image, a, image, b, end, end], 1) == 3
    assert finder.first_token([image, a, end], 1) == 3  # behind the text


def test_straddling_token_belongs_to_the_action():
    tokenizer = character_tokenizer(['", "act'])
    ids = tokenizer.encode('{"t": "x", "action": "y"}')
    finder = SpanFinder(tokenizer)
    assert [finder.token_bytes(i) for i in ids][8] == b'", "act'
    assert finder.first_token(ids, finder.text(ids).index(KEY)) == 8


def test_no_action_key_is_all_thought():
    assert SpanFinder(byte_level_tokenizer()).action_start(np.arange(20, 27), None) == 7


def test_unknown_decoder_falls_back_to_prefixes():
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "act": 1, "##ion": 2, "is": 3, "hit": 4}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    finder = SpanFinder(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))
    assert finder.text([1, 2, 3, 4]) == "action is hit"
    assert [finder.first_token([1, 2, 3, 4], at) for at in (0, 3, 7, 10)] == [0, 1, 2, 3]


BYTE_LEVEL = SpanFinder(byte_level_tokenizer())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 399), max_size=30))
def test_any_ids_give_text_and_rising_tokens(ids):
    text = BYTE_LEVEL.text(ids)
    tokens = [BYTE_LEVEL.first_token(ids, at) for at in range(len(text) + 1)]
    assert tokens == sorted(tokens)
    assert tokens[-1] == len(ids)
    text.encode()  # no lone surrogates
