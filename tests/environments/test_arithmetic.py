"""Exact arithmetic against independent answers: Python's own parser, brute force over all formulas, known counts."""

import ast
import doctest
import itertools
import random
import statistics
import time
import warnings
from collections import Counter
from fractions import Fraction
from math import factorial

import pytest
from hypothesis import given, settings, strategies as st

from trl_gtr.environments.cards import arithmetic
from trl_gtr.environments.cards.arithmetic import complete, evaluate, next_tokens, reachable, solve, tokenize


def python_value(elements):
    """The value by Python's own parser, from the syntax tree: numbers, the four binary operators, nothing else."""

    def value(node):
        if isinstance(node, ast.Constant):
            return Fraction(node.value)
        if not isinstance(node, ast.BinOp):
            raise ValueError
        left, right = value(node.left), value(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Div):
            return left / right
        raise ValueError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # "1 (2)" looks like a call to Python
            return value(ast.parse(" ".join(elements).strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


ELEMENTS = st.sampled_from(["1", "2", "3", "8", "10", "+", "-", "*", "/", "(", ")", " "])


@settings(max_examples=300, deadline=None)
@given(st.lists(ELEMENTS, max_size=13))
def test_evaluate_agrees_with_pythons_parser(elements):
    assert evaluate(elements) == python_value(elements)


@st.composite
def formulas(draw, depth=4):
    if depth == 0 or draw(st.booleans()):
        return [str(draw(st.integers(0, 13)))]
    inner = [*draw(formulas(depth - 1)), draw(st.sampled_from("+-*/")), *draw(formulas(depth - 1))]
    return ["(", *inner, ")"] if draw(st.booleans()) else inner


@settings(max_examples=100, deadline=None)
@given(formulas())
def test_whole_formulas_agree_with_pythons_parser(elements):
    assert evaluate(elements) == python_value(elements)
    assert tokenize(" ".join(elements)) == elements == tokenize("".join(elements))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8/(3-8/3)", 24),  # floats miss it
        ("5*(5-1/5)", 24),
        ("1/3", Fraction(1, 3)),
        ("10-4-3", 3),
        ("24/4/3", 2),
        ("24/(4/2)*3", 36),
        ("2-3*4", -10),
        ("((7))", 7),
    ],
)
def test_known_values(text, value):
    assert evaluate(tokenize(text)) == value


@pytest.mark.parametrize(
    "elements",
    [
        [],
        ["1", "2"],
        ["-", "1"],
        ["2", "*", "*", "3"],
        ["7", "/", "/", "2"],
        ["(", "1", "+", "2"],
        ["1", ")"],
        ["(", ")"],
        ["2", "(", "3", ")"],
        ["1", "/", "(", "2", "-", "2", ")"],
        ["0", "/", "0"],
        ["x"],
        ["08"],
        ["1.5"],
        ["=", "24"],
    ],
)
def test_no_value(elements):
    assert evaluate(elements) is None


def test_reading_is_not_limited_by_recursion_or_number_length():
    assert evaluate(["("] * 5_000 + ["1"] + [")"] * 5_000) == 1
    assert tokenize("9" * 10_000) is None
    assert evaluate(["9" * 10_000]) is None


@given(st.text(max_size=30))
def test_tokenize_takes_any_text(text):
    elements = tokenize(text)
    foreign = set(text) - set("0123456789+-*/() ")
    assert elements is None if foreign else elements is None or "".join(elements) == text.replace(" ", "")


def test_numbers_may_be_int_as_in_the_original_and_text_must_be_split():
    assert evaluate([8, "*", 3]) == 24
    assert next_tokens([8, "*"], [8, 3, 2, 2]) == next_tokens(["8", "*"], [8, 3, 2, 2])
    with pytest.raises(ValueError, match="tokenize"):
        evaluate("8*3")


# --- dead ends -------------------------------------------------------------------------------------------------------


def all_formulas(hand, operators, parentheses, limit):
    """Every legal beginning of a formula of at most `limit` elements, and those that are whole. By brute force."""
    beginnings, whole = [], []

    def grow(formula, left, depth):
        beginnings.append(formula)
        wants_number = not formula or formula[-1] in "+-*/("
        if not wants_number and depth == 0 and not left:
            whole.append(formula)
        if len(formula) == limit:
            return
        if wants_number:
            for number in set(left):
                rest = list(left)
                rest.remove(number)
                grow((*formula, str(number)), rest, depth)
            if parentheses:
                grow((*formula, "("), left, depth + 1)
        else:
            for operator in operators:
                grow((*formula, operator), left, depth)
            if depth:
                grow((*formula, ")"), left, depth - 1)

    grow((), list(hand), 0)
    return beginnings, whole


def check_against_brute_force(hand, target, operators, parentheses, limit, spaces=0):
    beginnings, whole = all_formulas(hand, operators, parentheses, limit - spaces)
    right = [formula for formula in whole if python_value(formula) == target]
    continuations, shortest = {}, {}
    for formula in right:
        for end in range(len(formula) + 1):
            begin = formula[:end]
            continuations.setdefault(begin, set()).add(formula[end] if end < len(formula) else "=")
            shortest[begin] = min(shortest.get(begin, 99), len(formula))
    rules = {"target": target, "operators": operators, "parentheses": parentheses, "max_elements": limit}
    for begin in beginnings:
        played = [*begin[: len(begin) // 2], *[" "] * spaces, *begin[len(begin) // 2 :]]
        expected = continuations.get(begin, set())
        assert next_tokens(played, hand, **rules) == expected, begin
        assert reachable(played, hand, **rules) == bool(expected), begin
        completion = complete(played, hand, **rules)
        if not expected:
            assert completion is None
        else:
            assert completion in right
            assert completion[: len(begin)] == begin
            assert len(completion) == shortest[begin]
    return len(beginnings), len(right)


@pytest.mark.parametrize(
    ("hand", "target", "operators", "parentheses", "limit", "spaces"),
    [
        ([4, 3], 12, "+*", False, 5, 0),
        ([4, 3], 12, "+*", False, 5, 1),
        ([6, 6], 12, "+*", False, 5, 2),
        ([3, 8], 24, "+-*/", True, 8, 0),
        ([3, 8], 24, "+-*/", True, 9, 2),
        ([5, 5, 1], Fraction(4, 5), "+-*/", True, 7, 0),
        ([6, 2, 2], 24, "+*/", True, 8, 1),
        ([1, 1, 2], 0, "-/", True, 8, 0),
        ([0, 0, 3], 3, "+-/", True, 7, 0),
        ([4, 2, 1], -1, "-*", True, 8, 0),
        ([8, 8, 3, 3], 24, "-/", True, 9, 0),
        ([2, 2, 2, 3], 24, "*+", True, 9, 0),
    ],
)
def test_every_dead_end_is_known(hand, target, operators, parentheses, limit, spaces):
    seen, right = check_against_brute_force(hand, target, operators, parentheses, limit, spaces)
    assert seen > right > 0  # otherwise the case would show nothing


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=3),
    st.fractions(min_value=-3, max_value=12, max_denominator=4),
    st.sampled_from(["+-*/", "+*", "-/", "*/", "+-", "/"]),
    st.booleans(),
    st.integers(1, 7),
    st.integers(0, 2),
)
def test_dead_ends_of_random_small_games(hand, target, operators, parentheses, limit, spaces):
    check_against_brute_force(hand, target, operators, parentheses, limit + spaces, spaces)


def test_the_limit_counts_parentheses_and_spaces():
    hand = [1, 1, 10, 2]  # (1+1)*(10+2) needs 11 elements, 2*(10+1+1) nine
    assert next_tokens(["(", "1", "+", "1", ")", "*"], hand, max_elements=11) == {"("}
    assert next_tokens(["(", "1", "+", "1", ")", "*"], hand, max_elements=10) == frozenset()
    assert reachable([" "] * 11, hand, max_elements=20)
    assert not reachable([" "] * 12, hand, max_elements=20)
    assert reachable(["("] * 6, hand)  # 6 + 4 numbers + 3 operators + 6 = 19
    assert not reachable(["("] * 7, hand)


def test_equals_comes_only_in_time_and_when_right():
    assert next_tokens(["8", "*", "3"], [8, 3], max_elements=3) == {"="}
    assert next_tokens(["8", "*", "3"], [8, 3], max_elements=2) == frozenset()
    assert next_tokens(["8", "+", "3"], [8, 3]) == frozenset()
    assert next_tokens(["8", "*", "3"], [8, 3, 1, 1]) == {"+", "-", "*", "/"}


@pytest.mark.parametrize("formula", [["7"], ["8", "8"], ["8", "8", "8"], ["+"], [")"], ["x"], ["8", "**"], ["٨"]])
def test_what_breaks_the_rules_is_a_dead_end(formula):
    arguments = (formula, [8, 8, 3, 3])
    assert next_tokens(*arguments) == frozenset()
    assert not reachable(*arguments)
    assert complete(*arguments) is None


def test_a_player_who_follows_the_completion_keeps_to_it():
    for hand in [(8, 3, 8, 3), (1, 5, 5, 5), (4, 7, 8, 8), (10, 10, 4, 4), (2, 3, 7, 10), (6, 6, 6, 6)]:
        plan = complete([], hand)
        for end in range(len(plan) + 1):
            assert complete(plan[:end], hand) == plan
            assert (*plan, "=")[end] in next_tokens(plan[:end], hand)


def random_prefixes(count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        hand = [min(rng.randint(1, 13), 10) for _ in range(4)]
        left, formula, depth = list(hand), [], 0
        for _ in range(rng.randint(0, 11)):
            if not formula or formula[-1] in "+-*/(":
                choices = [*map(str, left), "("]
            else:
                choices = [*("+-*/" if left else ""), *(")" if depth else "")]
            if not choices:
                break
            token = rng.choice(choices)
            depth += (token == "(") - (token == ")")
            if token.isdecimal():
                left.remove(int(token))
            formula.append(token)
        yield formula, hand


def test_the_dead_end_test_takes_less_than_2_ms():
    times = []
    for formula, hand in random_prefixes(600, seed=0):
        start = time.process_time()
        next_tokens(formula, hand)
        times.append(time.process_time() - start)
    assert statistics.median(times) < 0.002


# --- solutions -------------------------------------------------------------------------------------------------------


def distinct_functions(hand, target, rng):
    """How many right formulas there are as functions of the cards, by brute force.

    Each card carries its number and a random one. A formula that uses each card once is told from another by its value
    on the random numbers.
    """
    functions = {}

    def join(items):
        if len(items) == 1:
            if items[0][0] == target:
                functions[items[0][1]] = True
            return
        for i, j in itertools.permutations(range(len(items)), 2):
            rest = [item for k, item in enumerate(items) if k not in (i, j)]
            (a, x), (b, y) = items[i], items[j]
            results = [(a + b, x + y), (a - b, x - y), (a * b, x * y)]
            if b:
                results.append((a / b, x / y))
            for result in results[0 if i < j else 1 :]:
                join([*rest, result])

    cards = {number: Fraction(rng.randint(10**6, 10**7), rng.randint(10**6, 10**7)) for number in hand}
    join([(Fraction(number), cards[number]) for number in hand])
    return set(functions), cards


@pytest.mark.parametrize("hand", [(1, 2, 3, 4), (10, 9, 4, 1), (9, 7, 2, 3), (8, 6, 4, 2), (1, 3, 4, 6), (7, 5, 3, 1)])
def test_solve_finds_each_function_once(hand):
    functions, cards = distinct_functions(hand, 24, random.Random(1))
    solutions = solve(hand)
    assert len(solutions) == len(functions)
    for solution in solutions:
        assert python_value(solution) == 24
        assert Counter(int(element) for element in solution if element.isdecimal()) == Counter(hand)
    assert {evaluate_at(solution, cards) for solution in solutions} == functions


def evaluate_at(solution, cards):
    def value(node):
        if isinstance(node, ast.Constant):
            return cards[node.value]
        left, right = value(node.left), value(node.right)
        return {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right, ast.Div: left / right}[
            type(node.op)
        ]

    return value(ast.parse("".join(solution), mode="eval").body)


@pytest.mark.parametrize(
    ("hand", "target", "solutions"),
    [
        ([3, 8, 8, 3], 24, ["8/(3-8/3)"]),
        ([1, 2, 3, 4], 24, ["4*3*2*1", "4*3*2/1", "4*(3+2+1)", "(4+2)*(3+1)"]),
        ([6, 6, 6, 6], 24, ["6+6+6+6", "6*6-6-6"]),
        ([4, 4, 10, 10], 24, ["(10*10-4)/4"]),
        ([1, 1, 1, 1], 24, []),
        ([5, 5], 1, ["5/5"]),
        ([7], 7, ["7"]),
        ([8, 2, 3], 7, ["8+2-3", "8/2+3"]),  # 8-(3-2) is the first again
        ([1, 2], -1, ["1-2"]),
    ],
)
def test_known_solutions(hand, target, solutions):
    assert ["".join(solution) for solution in solve(hand, target)] == solutions


def test_turned_signs_are_one_solution():
    texts = ["".join(solution) for solution in solve([9, 5, 8, 2])]
    assert "(9-5)*(8-2)" in texts
    assert "(5-9)*(2-8)" not in texts


def test_solve_keeps_to_the_rules():
    assert [len(solution) for solution in solve([1, 2, 3, 4], max_elements=9)] == [7, 7, 9]
    assert solve([1, 2, 3, 4], parentheses=False) == solve([1, 2, 3, 4])[:2]
    assert solve([2, 6], 12, "+*") == (("6", "*", "2"),)
    assert solve([8, 3, 2], 7, "-") == (("8", "-", "(", "3", "-", "2", ")"),)  # no + to write it shorter
    assert solve([2, 3, 4, 4, 5], 24)


def test_731_of_1000_deals_have_a_solution():
    """The share for J = Q = K = 10, and 566 of 715 hands: both known from elsewhere."""
    solvable = weight = total = 0
    for hand in itertools.combinations_with_replacement(range(1, 11), 4):
        ways = factorial(4)
        for number, count in Counter(hand).items():
            ways = ways * (4 if number == 10 else 1) ** count // factorial(count)
        found = reachable([], hand)
        solvable, weight, total = solvable + found, weight + ways * found, total + ways
    assert solvable == 566
    assert total == 13**4
    assert weight / total == pytest.approx(0.731, abs=0.0005)


def test_the_simplest_solution_is_the_completion_of_nothing():
    rng = random.Random(5)
    for _ in range(60):
        hand = [rng.randint(1, 13) for _ in range(4)]
        solutions = solve(hand)
        assert complete([], hand) == (solutions[0] if solutions else None)
        assert reachable([], hand) == bool(solutions)


@pytest.mark.parametrize("numbers", [[], [1] * 6, [-1, 2], [1.5], ["8"], [True]])
def test_bad_numbers(numbers):
    with pytest.raises(ValueError, match="one to 5 integers"):
        solve(numbers)


@pytest.mark.parametrize("operators", ["", "^", "+x"])
def test_bad_operators(operators):
    with pytest.raises(ValueError, match="operators must be some of"):
        reachable([], [1, 2], operators=operators)


def test_examples_in_the_documentation():
    result = doctest.testmod(arithmetic)
    assert result.attempted >= 4
    assert result.failed == 0
