"""stdlib: the reader's own standard library as documents, whole packages held out."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from regard.data.corpora import open_corpus
from regard.data.corpora.stdlib_text import ModuleText, Stdlib, split_of


@pytest.fixture(scope="module")
def corpus() -> Stdlib:
    return Stdlib()


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small library with everything that can go wrong in it."""
    files = {
        "alpha.py": b"x = 1\n",
        "beta/__init__.py": b'"""Beta."""\n',
        "beta/deep.py": "이름 = '가'\r\n".encode(),
        "beta/tests/test_deep.py": b"assert True\n",
        "test/support.py": b"pass\n",
        "old.py": b"# -*- coding: latin-1 -*-\nname = 'caf\xe9'\n",
        "broken.py": b"name = 'caf\xe9'\n",
        "empty.py": b"",
        "site-packages/other.py": b"pass\n",
        "_sysconfigdata__linux.py": b"where = 'here'\n",
        "notes.txt": b"no source\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def everything(corpus: Stdlib) -> list[tuple[str, ModuleText]]:
    return [(split, corpus.example(split, i)) for split in corpus.splits for i in range(corpus.size(split))]


def test_documents_are_the_modules(library: Path) -> None:
    corpus = Stdlib(library)
    found = {document.name: document.text for _, document in everything(corpus)}
    assert found == {
        "alpha": "x = 1\n",
        "beta": '"""Beta."""\n',
        "beta.deep": "이름 = '가'\n",
        "old": "# -*- coding: latin-1 -*-\nname = 'café'\n",
    }
    assert corpus.undecodable == ["broken"]


def test_tests_are_read_when_asked_for(library: Path) -> None:
    names = {document.name for _, document in everything(Stdlib(library, tests=True))}
    assert {"beta.tests.test_deep", "test.support"} <= names


def test_the_digest_speaks_of_what_was_read(library: Path) -> None:
    before = Stdlib(library).digest
    assert Stdlib(library).digest == before
    (library / "notes.txt").write_text("changed")
    assert Stdlib(library).digest == before
    (library / "alpha.py").write_text("x = 2\n")
    assert Stdlib(library).digest != before


def test_a_package_is_in_one_split(corpus: Stdlib) -> None:
    where: dict[str, set[str]] = {}
    for split, document in everything(corpus):
        where.setdefault(document.name.split(".")[0], set()).add(split)
    assert all(splits == {split_of(package)} for package, splits in where.items())
    assert {split for splits in where.values() for split in splits} == {"train", "valid", "packages"}


def test_the_real_library(corpus: Stdlib) -> None:
    names = [document.name for _, document in everything(corpus)]
    assert len(names) == len(set(names)) > 200
    assert {"json.decoder", "ast", "contextlib", "os"} <= set(names)
    assert not any(part in ("site-packages", "test", "tests") for name in names for part in name.split("."))
    length = {
        split: sum(len(corpus.example(split, i).text) for i in range(corpus.size(split))) for split in corpus.splits
    }
    assert length["train"] > 3_000_000
    assert min(length["valid"], length["packages"]) > 50_000


def test_the_order_is_the_names(corpus: Stdlib) -> None:
    for split in corpus.splits:
        files = corpus._files[split]
        assert all(a.parts < b.parts for a, b in itertools.pairwise(files))
    assert open_corpus("stdlib").example("train", 3) == corpus.example("train", 3)


def test_errors(tmp_path: Path, corpus: Stdlib) -> None:
    with pytest.raises(ValueError, match="holds no Python source files"):
        Stdlib(tmp_path).size("train")
    with pytest.raises(IndexError, match=r"index=\d+ of split 'valid' in the corpus stdlib is not 0 to"):
        corpus.example("valid", corpus.size("valid"))
