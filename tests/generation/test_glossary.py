"""Terms that a text must hold: against trying every text, against the same search in lists, and with models."""

from __future__ import annotations

import itertools
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.errors import BadData
from regard.generation import GenerateConfig, Hypothesis
from regard.generation.constrained_search import ConstrainedSearch, Term, TermTracker
from regard.generation.glossary import Glossary, TermEncoder
from regard.models import Model

from .scripted import Script, ScriptEngine, prompts, search
from .spoken import LINES, translator

EOS = 2
Tokens = tuple[int, ...]


# ---- the search, in lists


def held(text: Tokens, terms: list[Tokens]) -> tuple[set[int], int]:
    """Which terms a text holds, and how many of its last tokens begin another one; no two share a token."""
    found, first = set[int](), 0
    for end in range(1, len(text) + 1):
        for start in range(first, end):  # the longest end of the text that begins a term
            begun = [n for n, term in enumerate(terms) if n not in found and term[: end - start] == text[start:end]]
            done = [n for n in begun if terms[n] == text[start:end]]
            if done:
                found.add(done[0])
                first = end
            if begun:
                break
    rest = [term for n, term in enumerate(terms) if n not in found]
    partial = (n for n in range(len(text) - first, 0, -1) if any(text[-n:] == term[:n] for term in rest))
    return found, next(partial, 0)


def needed(text: Tokens, terms: list[Tokens]) -> int:
    found, partial = held(text, terms)
    missing = [term for n, term in enumerate(terms) if n not in found]
    whole = sum(map(len, missing))
    return whole - partial


def grid(script: Script, prompt: Tokens, terms: list[Tokens], k: int, limit: int, penalty: float) -> list[Any]:
    """Grid beam search over all tokens: (text, score), best first."""
    beams, pool = [((), 0.0)], list[tuple[float, Tokens]]()
    for n in range(1, limit + 1):
        banks: dict[int, list[tuple[float, Tokens]]] = {}
        for text, score in beams:
            for token, log_prob in enumerate(script.log_probs(prompt + text)):
                longer = (*text, token)
                banks.setdefault(needed(longer, terms), []).append((score + log_prob, longer))
        banks = {need: sorted(bank, reverse=True) for need, bank in banks.items()}
        ended = [x for x in banks.get(0, [])[:k] if x[1][-1] == EOS or n == limit]
        pool = sorted([*pool, *((score / n**penalty, text) for score, text in ended)], reverse=True)[:k]
        going = [[x for x in bank if x[1][-1] != EOS][:k] for bank in banks.values()]
        beams = [(text, score) for bank in going for score, text in bank]
        if len(pool) == k and max(score for _, score in beams) / n**penalty <= pool[-1][0]:
            break
    return [(text, score) for score, text in pool]


def constrained(
    script: Script, texts: list[list[int]], terms: list[list[Tokens]], limits: list[int], *, static: bool, **fields: Any
) -> list[list[Hypothesis]]:
    config = GenerateConfig(max_new_tokens=max(limits), **fields)
    own = [[Term((term,)) for term in each] for each in terms]
    return ConstrainedSearch(ScriptEngine(script, static), config, EOS, own).run(prompts(texts, limits))


def random_terms(chance: random.Random) -> list[Tokens]:
    letters = [token for token in range(7) if token != EOS]
    return [tuple(chance.choices(letters, k=chance.randint(1, 3))) for _ in range(chance.randint(0, 2))]


def test_a_tracker_knows_what_a_text_holds() -> None:
    chance = random.Random(3)
    for _ in range(100):
        terms = [tuple(chance.choices((3, 4), k=chance.randint(1, 4))) for _ in range(chance.randint(1, 3))]
        tracker = TermTracker([Term((term,)) for term in terms])
        state, text = tracker.start, tuple(chance.choices((3, 4, 5), k=12))
        for n, token in enumerate(text, start=1):
            wanted = tracker.next_tokens(state)
            before, state = tracker.n_needed(state), tracker.step(state, token)
            assert tracker.n_needed(state) == needed(text[:n], terms)
            assert set(state.missing) == set(range(len(terms))) - held(text[:n], terms)[0]
            assert token in wanted or tracker.n_needed(state) >= before
    assert needed((3, 3, 4), [(3, 4)]) == 0


def test_one_of_several_spellings_is_enough_and_some_only_begin_words() -> None:
    tracker = TermTracker([Term(((8, 9),), ((9,),))], in_word=lambda token: token >= 5)
    for text, need in (((9,), 0), ((6, 9), 2), ((4, 9), 0), ((6, 8), 1), ((6, 8, 9), 0), ((6, 8, 4), 2)):
        state = tracker.start
        for token in text:
            state = tracker.step(state, token)
        assert tracker.n_needed(state) == need, text


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_it_is_grid_beam_search(static: bool) -> None:
    chance, texts = random.Random(5), [[1, 4], [3], [5, 5, 6]]
    for number in range(12):
        script, k = Script(number, eos_bias=(number % 3) * 1.0), chance.choice((1, 2, 3))
        terms, limits = [random_terms(chance) for _ in texts], [chance.randint(6, 9) for _ in texts]
        penalty = chance.choice((0.0, 0.6, 1.0))
        fields = {"beam": k, "n_best": k, "length_penalty": penalty}
        found = constrained(script, texts, terms, limits, static=static, **fields)
        for prompt, own, limit, best in zip(texts, terms, limits, found, strict=True):
            expected = grid(script, tuple(prompt), own, k, limit, penalty)
            assert [tuple(text.tokens) for text in best] == [text for text, _ in expected]
            assert [text.score for text in best] == pytest.approx([score for _, score in expected], abs=1e-4)
            assert all(needed(tuple(text.tokens), own) == 0 for text in best)


@pytest.mark.parametrize("seed", range(3))
def test_with_enough_beams_it_misses_nothing(seed: int) -> None:
    script, terms = Script(seed, n_tokens=5), [(3, 4), (1,)]
    (found,) = constrained(
        script, [[1]], [terms], [5], static=False, beam=5**4, early_stopping="never", length_penalty=1.0
    )
    texts = [(*text, EOS) for n in range(3, 5) for text in itertools.product((0, 1, 3, 4), repeat=n)] + list(
        itertools.product((0, 1, 3, 4), repeat=5)
    )
    scored = []
    for text in texts:
        if needed(text, terms) == 0:
            total = sum(script.log_probs((1, *text[:i]))[token] for i, token in enumerate(text))
            scored.append((total / len(text), text))
    assert (found[0].score, tuple(found[0].tokens)) == (pytest.approx(max(scored)[0], abs=1e-4), max(scored)[1])


def test_without_terms_it_is_beam_search() -> None:
    for seed in range(10):
        script, fields = Script(seed, eos_bias=1.0), {"beam": 3, "n_best": 3, "stop": ((3,),), "length_penalty": 1.0}
        ours = constrained(script, [[1], [4, 5]], [[], []], [6, 6], static=False, **fields)
        assert ours == search(script, [[1], [4, 5]], 6, **fields)


def test_what_has_no_room_or_is_forbidden_is_left_out() -> None:
    script = Script(1)
    (found,) = constrained(script, [[1]], [[(3, 4, 5), (6,)]], [3], static=False, beam=2)
    assert tuple(found[0].tokens) == (3, 4, 5)
    (found,) = constrained(script, [[1]], [[(3, 4), (6,)]], [4], static=False, beam=2, logit_bias={6: float("-inf")})
    assert needed(tuple(found[0].tokens), [(3, 4)]) == 0
    assert 6 not in found[0].tokens


# ---- which terms apply


@pytest.mark.parametrize(
    ("source", "text", "applies"),
    [
        ("cat", "The cat sat.", True),
        ("cat", "Cat, sit!", True),
        ("cat", "They concatenate cats.", False),
        ("Apple", "an apple", False),
        ("attention head", "An  attention\thead", True),
        ("C++", "C++ is old", True),
        ("고양이", "고양이가 앉았다.", True),
        ("물", "이 건물은 크다.", False),
        ("고양이", unicodedata.normalize("NFD", "고양이가"), True),
        ("猫", "黒猫がいる", True),
    ],
)
def test_a_term_applies_where_its_source_occurs(source: str, text: str, applies: bool) -> None:
    assert Glossary({source: "x"}).targets(text) == (["x"] if applies else [])


def test_the_longest_term_applies_and_each_once() -> None:
    glossary = Glossary({"head": "머리", "attention head": "어텐션 헤드", "dog": "개", "hound": "개"})
    assert glossary.targets("a hound, a dog and an attention head") == ["개", "어텐션 헤드"]


def test_a_file_of_terms(tmp_path: Path) -> None:
    file = tmp_path / "terms.tsv"
    file.write_bytes("\ufeffcat\t고양이\r\n\r\nattention head\t어텐션 헤드\n".encode())
    assert Glossary.read(file).terms == {"cat": "고양이", "attention head": "어텐션 헤드"}
    for line in ("cat", "cat\t", "a\tb\tc"):
        file.write_text(f"dog\t개\n{line}\n", encoding="utf-8")
        with pytest.raises(BadData, match=r"terms\.tsv:2: a term, a tab and its translation are needed"):
            Glossary.read(file)
    with pytest.raises(ValueError, match="empty side"):
        Glossary({"cat": " "})


# ---- with a model


@pytest.fixture(scope="module")
def model() -> Model:
    return translator()


TEXTS = ["the cat sat on the mat.", "no word of it", "a dog ran, and the cat ran too."]
TERMS = {"cat": "고양이", "dog": "the window", "mat": "위에"}


@pytest.mark.parametrize("fields", [{"beam": 1}, {"beam": 4, "n_best": 3}, {"beam": 2, "cache": "static"}], ids=str)
def test_translations_hold_their_terms(model: Model, fields: dict[str, Any]) -> None:
    made = regard.translate(model, TEXTS, glossary=TERMS, max_new_tokens=36, **fields)
    for text in made.n_best[0]:
        assert "고양이" in text.text
        assert "위에" in text.text
    for text in made.n_best[2]:
        assert "고양이" in text.text
        assert "the window" in text.text
    assert all(text.missing_terms == () for best in made.n_best for text in best)
    plain = regard.translate(model, TEXTS[1], max_new_tokens=36, **fields)
    assert made.n_best[1] == plain.n_best[0]  # a text without terms is translated as before
    for index in (0, 2):  # no text depends on those beside it
        (alone,) = regard.translate(model, TEXTS[index], glossary=TERMS, max_new_tokens=36, **fields).n_best
        assert [x.tokens for x in made.n_best[index]] == [x.tokens for x in alone]


def test_the_score_is_the_models_own(model: Model) -> None:
    """Cached decoding over beams that are chosen anew at each step gives the log P of a plain forward pass."""
    (best,) = regard.translate(model, TEXTS[0], glossary=TERMS, beam=3, max_new_tokens=30).n_best[0]
    source = torch.tensor([model.processor.source.encode(TEXTS[0])])
    tokens = [*best.tokens, *([2] if best.finish == "end" else [])]
    with torch.no_grad():
        log_probs = model(source, torch.tensor([[1, *tokens[:-1]]])).log_softmax(-1)[0]
    total = sum(log_probs[n, token].item() for n, token in enumerate(tokens))
    assert best.score == pytest.approx(total, abs=1e-3)
    (best,) = regard.translate(model, TEXTS[0], glossary=TERMS, beam=3, max_new_tokens=30, length_penalty=0.5).best
    assert best.score > total / 5


def test_terms_without_room_are_said(model: Model) -> None:
    (best,) = regard.translate(model, TEXTS[0], glossary=TERMS, max_new_tokens=12).best
    assert "고양이" in best.text
    assert best.missing_terms == ("위에",)
    with pytest.raises(ValueError, match="glossary=… needs greedy or beam search, without sampling"):
        regard.translate(model, TEXTS[0], glossary=TERMS, top_k=3)


def test_terms_in_the_tokens_of_every_kind() -> None:
    """A word has a space before it, at the beginning of a text none; what has no token cannot be written."""
    model = translator(joint=False)  # letters
    encoder = TermEncoder(model.processor.target)
    (term,) = encoder.terms(["매트"])
    assert [model.processor.target.decode(ids) for ids in (*term.anywhere, *term.after_word)] == [" 매트", "매트"]
    assert encoder.terms(["q"]) == []
    made = regard.translate(model, "the cat sat", glossary={"cat": "매트", "sat": "q"}, beam=2)
    assert "매트" in made[0]
    assert made.best[0].missing_terms == ("q",)
    assert LINES[3].startswith("고양이")
