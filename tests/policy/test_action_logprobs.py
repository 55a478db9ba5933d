import base64
import json
import random
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tokenizer_cases import mistral, package_data, sentencepiece_like
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
)
from vlms import byte_level_tokenizer, character_tokenizer

from trl_gtr.policy import action_logprobs
from trl_gtr.policy.action_logprobs import SpanFinder, token_logprobs, weighted_logprob

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


class TestTokenLogprobs:
    VOCABULARY, PROMPT, LENGTH, BATCH = 23, 6, 9, 4

    def setup_method(self):
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(self.BATCH, self.LENGTH, self.VOCABULARY, generator=generator) * 3
        self.ids = torch.randint(3, self.VOCABULARY, (self.BATCH, self.LENGTH), generator=generator)
        self.prompt = torch.randint(3, self.VOCABULARY, (self.BATCH, self.PROMPT), generator=generator)
        self.prompt_mask = torch.arange(self.PROMPT) >= torch.tensor([0, 2, 4, 5])[:, None]
        self.prompt[~self.prompt_mask] = 2  # padding is EOS: it must not count as seen
        self.ids[:, -1] = 2
        self.suppressed = torch.zeros(self.VOCABULARY, dtype=torch.bool)
        self.suppressed[[0, 1]] = True

    def sampler(self, temperature, penalty):
        """Step by step and row by row with transformers' own processors, in float64."""
        steps = [SuppressTokensLogitsProcessor([0, 1]), TemperatureLogitsWarper(temperature)]
        if penalty != 1.0:
            steps.insert(0, RepetitionPenaltyLogitsProcessor(penalty))
        result = torch.zeros(self.BATCH, self.LENGTH, self.VOCABULARY, dtype=torch.float64)
        for row in range(self.BATCH):
            seen = self.prompt[row][self.prompt_mask[row]]
            for step in range(self.LENGTH):
                scores = self.logits[row, step].double()[None]
                for process in steps:
                    scores = process(torch.cat([seen, self.ids[row, :step]])[None], scores)
                result[row, step] = scores[0].log_softmax(-1)
        return result

    def score(self, logits=None, temperature=0.3, penalty=1.0, **options):
        return token_logprobs(
            self.logits if logits is None else logits,
            self.ids,
            temperature=temperature,
            suppressed=self.suppressed,
            repetition_penalty=penalty,
            prompt_ids=self.prompt,
            prompt_mask=self.prompt_mask,
            **options,
        )

    @pytest.mark.parametrize("temperature", [0.2, 1.0])
    @pytest.mark.parametrize("penalty", [1.0, 1.3, 0.8])
    @pytest.mark.parametrize("chunk", [1, 10**9])
    def test_is_what_the_sampler_draws_from(self, temperature, penalty, chunk, monkeypatch):
        monkeypatch.setattr(action_logprobs, "CHUNK_ELEMENTS", chunk)
        logprobs, entropy = self.score(temperature=temperature, penalty=penalty, with_entropy=True)
        expected = self.sampler(temperature, penalty)
        assert logprobs.dtype == entropy.dtype == torch.float32
        assert torch.allclose(logprobs.double(), expected.gather(-1, self.ids[..., None])[..., 0], atol=2e-5)
        distribution = torch.distributions.Categorical(logits=expected.clamp(min=-1e4))
        assert torch.allclose(entropy.double(), distribution.entropy(), atol=1e-5)

    def test_chunks_give_the_same_gradient(self, monkeypatch):
        gradients = []
        for chunk in (10**9, 1):
            monkeypatch.setattr(action_logprobs, "CHUNK_ELEMENTS", chunk)
            logits = self.logits.clone().requires_grad_()
            self.score(logits, penalty=1.2)[0].sum().backward()
            gradients.append(logits.grad)
        assert gradients[0].abs().max() > 0.1
        assert torch.equal(*gradients)

    def test_bf16_logits_are_scored_in_float32(self):
        logits = self.logits.bfloat16()
        scored = self.score(logits)[0]
        assert torch.equal(scored, self.score(logits.float())[0])
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(scored, self.score(logits)[0])

    def test_suppressed_padding_does_not_poison_the_gradient(self):
        logits = self.logits.clone().requires_grad_()
        self.ids[:, -3:] = 0
        logprobs = self.score(logits)[0]
        mask = torch.ones_like(self.ids)
        mask[:, -3:] = 0
        assert logprobs[0, -1] == -torch.inf
        weighted_logprob(logprobs, mask, torch.full((self.BATCH,), 2), 0.5)[0].sum().backward()
        assert logits.grad.isfinite().all()
        assert (logits.grad[:, -3:] == 0).all()

    def test_repetition_penalty_needs_the_prompt(self):
        with pytest.raises(ValueError, match="prompt_ids"):
            token_logprobs(self.logits, self.ids, repetition_penalty=1.2)


class TestWeightedLogprob:
    LOGPROBS = torch.tensor([[-1.0, -2.0, -4.0, -8.0], [-1.0, -2.0, -4.0, -torch.inf], [-1.0, -2.0, -torch.inf, 0.0]])
    MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]])

    def weighted(self, starts, coef):
        return [x.tolist() for x in weighted_logprob(self.LOGPROBS, self.MASK, torch.tensor(starts), coef)]

    def test_thought_counts_lambda_times(self):
        total, thought, action = self.weighted([2, 1, 0], 0.5)
        assert thought == [-3, -1, 0]
        assert action == [-12, -6, -3]
        assert total == [-13.5, -6.5, -3]

    @pytest.mark.parametrize(
        ("coef", "expected"), [(0.5, [-7.5, -3.5, -1.5]), (0.2, [-3, -1.4, -0.6]), (0, [-15, -7, -3])]
    )
    def test_without_action_key_every_token_counts(self, coef, expected):
        total, thought, action = self.weighted([4, 3, 2], coef)
        assert total == pytest.approx(expected)
        assert (thought, action) == ([-15, -7, -3], [0, 0, 0])

    def test_lambda_zero_leaves_the_action(self):
        assert self.weighted([2, 1, 1], 0.0)[0] == [-12, -6, -2]

    def test_sums_in_float32(self):
        logprobs = torch.full((1, 2048), -0.0101, dtype=torch.bfloat16)
        total = weighted_logprob(logprobs, torch.ones(1, 2048), torch.tensor([0]), 0.5)[0]
        assert total.dtype == torch.float32
        assert total.item() == pytest.approx(2048 * logprobs[0, 0].item(), rel=1e-5)
