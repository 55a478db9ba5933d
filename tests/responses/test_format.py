"""The response format: every text can be read, and what was rendered is read back exactly."""

from __future__ import annotations

import json
import pickle
import time

import pytest
from hypothesis import given, settings, strategies as st

from trl_gtr.responses.format import Field, ThoughtFormat

POINTS = ThoughtFormat([Field("cards", "list", "ranks"), Field("formula"), Field("thoughts")], action_help="a symbol")
LINE = ThoughtFormat([Field("current number", "number"), Field("target number", "number"), Field("thoughts")])
PLAIN = ThoughtFormat([Field("thoughts")])
ACTION_ONLY = ThoughtFormat([])
FORMATS = [POINTS, LINE, PLAIN, ACTION_ONLY]
GOOD = '{"cards": ["4", "K"], "formula": "4", "thoughts": "I add.", "action": "+"}'


def spans_agree(response) -> None:
    """What holds for every response, valid or not."""
    start, end = response.thought_span
    assert start == 0
    if response.action_span is None:
        assert end == len(response.text)
    else:
        assert response.action_span == (end, len(response.text))
    assert response.valid == (response.error is None)
    assert not response.valid or response.action


# -- writing -------------------------------------------------------------------------------------------------


def test_render_is_one_line_of_plain_json():
    thought = {"cards": ["4", "K"], "formula": "4", "thoughts": "I add."}
    assert POINTS.render(thought, "+") == GOOD
    assert POINTS.render_thought(thought) == '{"cards": ["4", "K"], "formula": "4", "thoughts": "I add.", '
    assert POINTS.render(dict(reversed(thought.items())), "+") == GOOD  # the schema's order, not the mapping's
    assert ACTION_ONLY.render({}, "hit") == '{"action": "hit"}'
    assert PLAIN.render({"thoughts": 'é "×"\n'}, "hit") == '{"thoughts": "é \\"×\\"\\n", "action": "hit"}'
    assert LINE.render({"current number": 3, "target number": 0, "thoughts": ""}, "-") == (
        '{"current number": 3, "target number": 0, "thoughts": "", "action": "-"}'
    )


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_example_in_the_instructions_is_a_valid_response(fmt):
    text = fmt.instructions()
    response = fmt.parse(text)
    assert response.valid, response.error
    assert list(response.fields) == [field.key for field in fmt.fields]
    for key in [*(field.key for field in fmt.fields), "action"]:
        assert text.count(f'"{key}": ') >= 2  # in the example and explained


def test_instructions_carry_the_help():
    assert '"cards": ranks\n' in POINTS.instructions()
    assert POINTS.instructions().endswith('"action": a symbol')


@pytest.mark.parametrize(
    ("thought", "named"),
    [
        ({"cards": ["4"], "formula": "4"}, "thoughts"),
        ({"cards": ["4"], "formula": "4", "thoughts": "", "mood": "x"}, "mood"),
        ({"cards": "4", "formula": "4", "thoughts": ""}, "cards"),
        ({"cards": [None], "formula": "4", "thoughts": ""}, "cards"),
        ({"cards": [], "formula": None, "thoughts": ""}, "formula"),
        ({"cards": [], "formula": True, "thoughts": ""}, "formula"),
    ],
)
def test_a_thought_that_does_not_fit_is_refused(thought, named):
    with pytest.raises(ValueError, match=named):
        POINTS.render_thought(thought)


@pytest.mark.parametrize(
    "value", ["three", None, True, float("nan"), float("inf"), pytest.param(10**5000, id="huge"), "9" * 5000, [3]]
)
def test_a_number_field_takes_numbers_only(value):
    with pytest.raises(ValueError, match="current number"):
        LINE.check_thought({"current number": value, "target number": 1, "thoughts": ""})


def test_respond_is_parse_of_render():
    assert POINTS.respond({"cards": [4, "K"], "formula": "4", "thoughts": "I add."}, " + ") == POINTS.parse(
        GOOD.replace('"+"', '" + "')
    )
    assert PLAIN.respond({"thoughts": "a"}, " ") == PLAIN.parse('{"thoughts": "a", "action": " "}')


def test_check_thought_puts_order_and_types_right():
    checked = POINTS.check_thought({"thoughts": "t", "formula": 4, "cards": (4, "K")})
    assert checked == {"cards": ["4", "K"], "formula": "4", "thoughts": "t"}
    assert list(checked) == ["cards", "formula", "thoughts"]


@pytest.mark.parametrize("fields", [[Field("a"), Field("A")], [Field("action")], [Field("")], [Field("a", "bool")]])
def test_a_schema_with_clashing_keys_or_unknown_kinds_is_refused(fields):
    with pytest.raises(ValueError, match=r"kind|keys"):
        ThoughtFormat(fields)


def test_formats_are_values():
    assert pickle.loads(pickle.dumps(POINTS)) == POINTS
    assert ThoughtFormat((Field("thoughts"),)) == PLAIN
    assert hash(PLAIN) == hash(ThoughtFormat([Field("thoughts")]))


# -- reading what is right or plainly meant ------------------------------------------------------------------


def test_parse_reads_a_good_response():
    response = POINTS.parse(GOOD)
    assert response.valid
    assert response.fields == {"cards": ["4", "K"], "formula": "4", "thoughts": "I add."}
    assert response.action == "+"
    assert response.thought == '{"cards": ["4", "K"], "formula": "4", "thoughts": "I add.", '
    assert response.action_span == (GOOD.index('"action"'), len(GOOD))


REPAIRED = {
    "code fence": '```json\n{"thoughts": "a", "action": "hit"}\n```',
    "preamble and epilogue": 'Sure {see below}: {"thoughts": "a", "action": "hit"} I hope {this} helps.',
    "single quotes": "{'thoughts': 'a', 'action': 'hit'}",
    "trailing comma": '{"thoughts": "a", "action": "hit",}',
    "bare words": "{thoughts: a, action: hit}",
    "line breaks": '{\n  "thoughts": "a",\n  "action":\t"hit"\n}',
    "key spelled otherwise": '{"Thoughts": "a", "ACTION": "hit"}',
    "missing brace": '{"thoughts": "a", "action": "hit"',
    "missing brace after a comma": '{"thoughts": "a", "action": "hit", ',
    "same key twice, same value": '{"thoughts": "a", "thoughts": "a", "action": "hit"}',
    "unknown key": '{"mood": {"deep": [1, {"action": "stand"}]}, "thoughts": "a", "action": "hit"}',
    "white space around the action": '{"thoughts": "a", "action": " hit\\n"}',
    "in a list": '[{"thoughts": "a", "action": "hit"}]',
    "Python's constants": "{'ok': True, 'no': None, 'thoughts': 'a', 'action': 'hit'}",
    "escaped letters": '{"thoughts": "\\u0061", "action": "\\u0068it"}',
    "cut off second try": '{"thoughts": "a", "action": "hit"}\n{"thoughts": "b", "action": "st',
    "broken first try": '{"thoughts": "b" "action": "stand"}\n{"thoughts": "a", "action": "hit"}',
    "an earlier object": '{"thoughts": "b", "action": "stand"} No: {"thoughts": "a", "action": "hit"}',
    "a later object without an action": '{"thoughts": "a", "action": "hit"} {"note": "done"}',
    "action in the thought's words": '{"quote": "\\"action\\": \\"stand\\"", "thoughts": "a", "action": "hit"}',
}


@pytest.mark.parametrize("case", REPAIRED)
def test_what_is_plainly_meant_is_read_as_meant(case):
    text = REPAIRED[case]
    response = PLAIN.parse(text)
    assert response.valid, response.error
    assert response.fields == {"thoughts": "a"}
    assert response.action == "hit"
    assert text[response.action_span[0] :].lstrip("\"'").casefold().startswith("action")
    spans_agree(response)


def test_the_action_key_is_the_chosen_object_s_own():
    text = REPAIRED["an earlier object"]
    assert PLAIN.parse(text).action_span[0] == text.rindex('"action"')
    text = REPAIRED["cut off second try"]
    assert PLAIN.parse(text).action_span[0] == text.index('"action"')
    text = REPAIRED["unknown key"]
    assert PLAIN.parse(text).action_span[0] == text.rindex('"action"')


def test_action_inside_a_string_is_no_key():
    text = '{"thoughts": "I write {\'action\': \'stand\'} or \\"action\\": now", "action": "hit"}'
    response = PLAIN.parse(text)
    assert (response.action, response.action_span[0]) == ("hit", text.rindex('"action"'))
    assert response.fields["thoughts"] == "I write {'action': 'stand'} or \"action\": now"


def test_numbers_and_texts_stand_for_each_other_where_that_is_plain():
    response = POINTS.parse("{'cards': (4, K, 10), 'formula': 4, 'thoughts': 'it\\'s what I don't know', 'action': 1}")
    assert response.valid, response.error
    assert response.fields == {"cards": ["4", "K", "10"], "formula": "4", "thoughts": "it's what I don't know"}
    assert response.action == "1"
    response = LINE.parse('{"current_number": "3", "target number": -2.5, "thoughts": "", "action": "+"}')
    assert response.fields == {"current number": 3, "target number": -2.5, "thoughts": ""}


def test_bare_signs_are_actions():
    for sign in "+-*/=":
        assert ACTION_ONLY.parse(f'{{"action": {sign}}}').action == sign


def test_escapes():
    text = '{"thoughts": "\\ud83d\\ude00 \\ud83d \\q \\u12 a\\/b\\\\", "action": "hit"}'
    assert PLAIN.parse(text).fields["thoughts"] == "\U0001f600 \ud83d \\q \\u12 a/b\\"


# -- reading what is wrong -----------------------------------------------------------------------------------

INVALID = {
    "nothing": ("", "no JSON object", None),
    "prose": ("I hit.", "no JSON object", None),
    "list": ('["hit"]', "no JSON object", None),
    "no brace, but a key": ('"thoughts": "a", "action": "hit"', "no JSON object", 17),
    "empty object": ("{}", '"thoughts" is missing', None),
    "missing thought": ('{"action": "hit"}', '"thoughts" is missing', 1),
    "missing action": ('{"thoughts": "a"}', '"action" is missing', None),
    "action first": ('{"action": "hit", "thoughts": "a"}', "must be the last key", 1),
    "unknown key after the action": ('{"thoughts": "a", "action": "hit", "x": 1}', "must be the last key", 18),
    "action twice": ('{"thoughts": "a", "action": "hit", "action": "stand"}', "twice", 18),
    "thought twice": ('{"thoughts": "a", "thoughts": "b", "action": "hit"}', "twice", 35),
    "null action": ('{"thoughts": "a", "action": null}', '"action" must be a text', 18),
    "empty action": ('{"thoughts": "a", "action": " "}', '"action" is empty', 18),
    "list action": ('{"thoughts": "a", "action": ["hit"]}', '"action" must be a text', 18),
    "null thought": ('{"thoughts": null, "action": "hit"}', '"thoughts" must be a text', 19),
    "wrapped": ('{"answer": {"thoughts": "a", "action": "hit"}}', '"thoughts" is missing', None),
    "inner quotes": ('{"thoughts": "play "hit" now", "action": "hit"}', "no JSON at character 20", 31),
    "missing comma": ('{"thoughts": "a" "action": "hit"}', "no JSON at character 17", 17),
    "junk after the action": ('{"thoughts": "a", "action": "hit" or "stand"}', "no JSON at character 34", 18),
    "cut in the thought": ("{\"thoughts\": \"I see {'action': 'hit'} and", "ends before", None),
    "cut in the key": ('{"thoughts": "a", "acti', "ends before", None),
    "cut after the key": ('{"thoughts": "a", "action"', "ends before", 18),
    "cut before the value": ('{"thoughts": "a", "action": ', "ends before", 18),
    "cut in the value": ('{"thoughts": "a", "action": "hi', "ends before", 18),
    "cut in a bare value": ('{"thoughts": "a", "action": 1', "ends before", 18),
    "cut in an escape": ('{"thoughts": "a\\', "ends before", None),
    "cut after another key": ('{"thoughts": "a", "action": "hit", "x": "', "ends before", 18),
    "nested action only": ('{"thoughts": "a", "x": {"action": "hit"}', "ends before", None),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_texts_say_why_and_where_the_action_starts(case):
    text, reason, start = INVALID[case]
    response = PLAIN.parse(text)
    assert not response.valid
    assert reason in response.error
    assert response.action_span == (None if start is None else (start, len(text)))
    assert start is None or text[start:].startswith('"action"')
    spans_agree(response)


def test_what_was_found_in_a_cut_response_is_kept():
    response = POINTS.parse('{"cards": ["4", "K"], "formula": "4", "thoughts": "I a')
    assert response.fields == {"cards": ["4", "K"], "formula": "4"}
    assert response.action is None
    response = POINTS.parse('{"cards": "4 K", "formula": "4", "thoughts": "a", "action": "+"}')
    assert response.fields == {"formula": "4", "thoughts": "a"}
    assert response.action == "+"
    assert response.error == '"cards" must be a list of texts'


@pytest.mark.parametrize(
    "unit",
    ["[", "{", '{"a":', '{"a":[', '{"a":({', "{'", "{'a' ", '{"', "{a", '"action":', '{"x":1}', '{"a":1,', "\\", "' ",
     '{"thoughts":"x', '{"a":"\\"', "{a ", '"action" ', "\ud800"],
)  # fmt: skip
def test_hostile_texts_take_linear_time(unit):
    """100 kB of each; quadratic work or recursion would show as minutes or as a RecursionError."""
    texts = [unit * (100_000 // len(unit)), '{"action": ' + unit * (100_000 // len(unit))]
    started = time.process_time()
    for text in texts:
        spans_agree(POINTS.parse(text))
    assert time.process_time() - started < 10


def test_a_long_line_is_read():
    thought = {"thoughts": 'x"\\' * 40_000}
    assert PLAIN.parse(PLAIN.render(thought, "hit")).fields == thought


def test_parse_is_fast():
    started = time.process_time()
    for _ in range(1000):
        POINTS.parse(GOOD)
    assert time.process_time() - started < 1.0  # 1 ms each; measured 0.06 ms


# -- properties ----------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=()), max_size=40)  # any code point, lone surrogates too
PIECES = [*"{}[]():,\"'\\ \n4+K.=", '"action"', '"thoughts": ', '{"action": "+"}', "'action': '+'", "null", "action"]
NUMBERS = st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
THOUGHTS = {
    POINTS: st.fixed_dictionaries({"cards": st.lists(TEXTS, max_size=5), "formula": TEXTS, "thoughts": TEXTS}),
    LINE: st.fixed_dictionaries({"current number": NUMBERS, "target number": NUMBERS, "thoughts": TEXTS}),
    PLAIN: st.fixed_dictionaries({"thoughts": TEXTS}),
    ACTION_ONLY: st.just({}),
}
RESPONSES = st.sampled_from(FORMATS).flatmap(
    lambda fmt: st.tuples(st.just(fmt), THOUGHTS[fmt], TEXTS.map(str.strip).filter(bool))
)


@settings(max_examples=800, deadline=None)
@given(RESPONSES)
def test_parse_inverts_render(case):
    fmt, thought, action = case
    text, segment = fmt.render(thought, action), fmt.render_thought(thought)
    assert "\n" not in text
    assert text == segment + f'"action": {json.dumps(action, ensure_ascii=False)}}}'
    assert json.loads(text) == {**thought, "action": action}
    response = fmt.parse(text)
    assert response.valid
    assert dict(response.fields) == thought
    assert list(response.fields) == [field.key for field in fmt.fields]
    assert all(type(value) is type(thought[key]) for key, value in response.fields.items())
    assert response.action == action
    assert response.thought_span == (0, len(segment))
    assert response.action_span == (len(segment), len(text))
    assert fmt.respond(thought, action) == response


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(FORMATS), st.text(st.characters(exclude_categories=()), max_size=120), st.randoms())
def test_parse_never_raises(fmt, text, random):
    spans_agree(fmt.parse(text))
    for _ in range(8):
        spans_agree(fmt.parse("".join(random.choices(PIECES, k=random.randint(1, 40)))))


@settings(max_examples=300, deadline=None)
@given(RESPONSES, st.randoms())
def test_mutated_responses_never_raise(case, random):
    fmt, thought, action = case
    for _ in range(20):
        text = fmt.render(thought, action)
        for _ in range(random.randint(1, 3)):
            start = random.randint(0, len(text))
            text = text[:start] + random.choice(["", *PIECES]) + text[start + random.randint(0, 3) :]
        spans_agree(fmt.parse(text))


@settings(max_examples=300, deadline=None)
@given(RESPONSES)
def test_a_cut_text_keeps_its_spans(case):
    """Cut anywhere: the action's key is where it was, if it was written to its end, and no half action is valid."""
    fmt, thought, action = case
    text, key = fmt.render(thought, action), len(fmt.render_thought(thought))
    for end in range(len(text)):
        response = fmt.parse(text[:end])
        assert response.action_span == ((key, end) if end >= key + len('"action"') else None)
        assert response.valid == (end == len(text) - 1)  # only the last brace may be missing
        spans_agree(response)
