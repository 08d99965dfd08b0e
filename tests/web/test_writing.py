"""What is told of a text while it is written: labels that are made once, and a table that a spreadsheet may open."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from generation.spoken import LINES
from regard.config import ModelConfig
from regard.lens.labels import Label, token_labels
from regard.text.tokenizer_training import train_tokenizer
from regard.web import stream_writing
from regard.web.look_queries import cell_texts
from regard.web.stream_writing import GrowingLabels

KOREAN = ["나는 한국어를 배운다 .", "뭐 , 괜찮아 ? 응 !", "삶 ; 앎 = 닭 + 값", "\u1112\u1161\u11ab"]
SIZES = {"bpe": 300, "bytes": None, "chars": None, "words": None, "unigram": 90}


def growing(kind: str | None) -> Any:
    """What GrowingLabels reads of a served model."""
    tokenizer = None if kind is None else train_tokenizer([*LINES, *KOREAN], kind, SIZES[kind])  # type: ignore[arg-type]  # keys above
    config = ModelConfig(vocab_size=400, pad_id=0, bos_id=1, eos_id=2)
    return SimpleNamespace(target_tokenizer=tokenizer, config=config)


def said(labels: list[Label]) -> list[tuple[str, bool]]:
    return [(label.text, label.special) for label in labels]


@pytest.mark.parametrize("kind", [*SIZES, None])
def test_labels_of_a_growing_text_are_those_of_the_whole(kind: str | None) -> None:
    served, draw = growing(kind), random.Random(0)
    tokenizer = served.target_tokenizer
    size = 50 if tokenizer is None else tokenizer.size
    texts = [[draw.randrange(size + 2) for _ in range(30)] for _ in range(10)]  # nonsense, special and unknown tokens
    if tokenizer is not None:
        texts += [list(tokenizer.encode(" ".join(KOREAN))), [1, 1, *tokenizer.encode("괜찮아 ?  응")]]
    for tokens in texts:
        labelling, n = GrowingLabels(served), 0
        while n < len(tokens):
            n = min(len(tokens), n + draw.choice((1, 1, 1, 2, 5)))
            wanted = said(token_labels(tokens[:n], tokenizer, served.config))
            assert said(labelling.update(tokens[:n])) == wanted


def test_a_long_text_is_read_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0

    def counted(tokens: Any, *rest: Any) -> list[Label]:
        nonlocal read
        read += len(tokens)
        return token_labels(tokens, *rest)

    monkeypatch.setattr(stream_writing, "token_labels", counted)
    served = growing("bytes")
    tokens = list(served.target_tokenizer.encode(" ".join(KOREAN) * 8))
    labelling = GrowingLabels(served)
    for n in range(len(tokens)):
        labelling.update(tokens[: n + 1])
    assert len(tokens) > 500
    assert read < 7 * len(tokens), "a character of three bytes, and the one before it"


def test_cells_that_a_spreadsheet_would_run() -> None:
    texts = ["", "a", "=1+1", "+1", "-1", "@x", "\tx", "\r=1", "\n=1", "a=b", " "]
    found = cell_texts(cast(Any, [Label(text) for text in texts]))
    assert found == ["", "a", "'=1+1", "'+1", "'-1", "'@x", "'\tx", "'\r=1", "'\n=1", "a=b", " "]
