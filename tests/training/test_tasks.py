"""What each task asks of a model: batches that are right, the same whenever they are made, and honest evaluations."""

from __future__ import annotations

import hashlib
import json
import math
import random
import subprocess
import sys
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from regard import cli
from regard.config import RunConfig
from regard.data.examples import ImageExample, Labelled, Pair, Tagged, Text
from regard.data.sources import open_source
from regard.models import build
from regard.recipes import run_config
from regard.text.processor import Processor
from regard.text.tokenizer import MASK, SPECIAL, Tokenizer
from regard.training.loss import IGNORE, Batch, Objective
from regard.training.tasks import Task, open_task, translation

from .runs import environment, latest, metrics, words_of, write_data


def write_images(folder: Path) -> str:
    """A folder for each class: bright and dark squares."""
    chosen = np.random.default_rng(3)
    for name, low in (("bright", 128), ("dark", 0)):
        (folder / "images" / name).mkdir(parents=True)
        for number in range(9):
            pixels = chosen.integers(low, low + 128, (8, 8, 1), dtype=np.uint8).repeat(3, axis=2)
            Image.fromarray(pixels).save(folder / "images" / name / f"{number}.png")
    return str(folder / "images")


@pytest.mark.parametrize("kind", ["bpe", "bytes", "chars"])
def test_a_run_reads_decomposed_hangul_as_its_data(kind: str, tmp_path: Path) -> None:
    """macOS writes syllables as letters; the data of a run is composed, and so are the texts its model gets."""
    (tmp_path / "a.txt").write_text("나는 학교에 간다\n" * 20, encoding="utf-8")
    words = [f"data={tmp_path / 'a.txt'}", f"data.tokenizer={kind}", "data.vocab_size=300"]
    decomposed = unicodedata.normalize("NFD", "나는 학교")
    for normalise in ("NFC", "none"):
        config = run_config("lm", [*words, f"data.normalise={normalise}"])
        task = open_task(config, open_source(config.data))
        same = task.tokenizer.encode("나는 학교") == task.tokenizer.encode(decomposed)
        assert same == (normalise == "NFC" or kind == "chars")


IMAGES = (
    *("model.image_size=8", "model.patch_size=4", "model.n_channels=1", "model.d_model=16", "model.n_heads=2"),
    *("model.d_ff=16", "model.n_layers=1", "train.batch_tokens=16", "train.seed=5"),
)


def config_of(task: str, folder: Path, *more: str) -> RunConfig:
    """A small run of any task; what it learns from is written where it is not there yet."""
    if task == "classify-images":
        data = str(folder / "images") if (folder / "images").exists() else write_images(folder)
        return run_config(task, [f"data={data}", "data.valid_fraction=0.2", *IMAGES, *more])
    if task == "caption":
        return run_config(task, ["data=shapes", "data.epoch_examples=12", "train.batch_tokens=256", *more])
    return run_config(task, words_of(task, write_data(task, folder), *more))


def open_(task: str, folder: Path, *more: str) -> Task:
    config = config_of(task, folder, *more)
    return open_task(config, open_source(config.data))


def digest(batch: Batch) -> str:
    parts = [*batch.inputs, batch.targets, *(batch.options[name] for name in sorted(batch.options))]
    shapes = [tuple(x.shape) for x in parts]
    content = b"".join(x.contiguous().numpy().tobytes() for x in parts)
    return hashlib.sha256(f"{shapes} {batch.n_tokens} {batch.n_targets}".encode() + content).hexdigest()


def epoch_of(task: Task, number: int = 0) -> list[Batch]:
    return [task.batch(number * task.batches_per_epoch + n) for n in range(task.batches_per_epoch)]


TASKS = ("translate", "lm", "mlm", "classify", "classify-images", "caption")
MORE = {"translate": ("data.hide_rate=0.3",), "classify-images": ("data.shift=2", "data.flip=true")}
DIGESTS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from training.test_tasks import MORE, TASKS, digest, open_
numbers = json.loads(sys.argv[3])
made = {}
for name in TASKS:
    task = open_(name, Path(sys.argv[2]), *MORE.get(name, ()))
    made[name] = {str(n): digest(task.batch(n)) for n in numbers}
print(json.dumps(made))
"""


def test_a_batch_is_a_function_of_its_number(tmp_path: Path) -> None:
    """In whatever order they are asked for, by another task object in another process, whose hashes are others."""
    opened = {name: open_(name, tmp_path, *MORE.get(name, ())) for name in TASKS}
    numbers = [0, 7, 3, 3, 11, 1]
    here = {name: {str(n): digest(task.batch(n)) for n in numbers} for name, task in opened.items()}
    tests = Path(__file__).resolve().parents[1]
    call = [sys.executable, "-c", DIGESTS, str(tests), str(tmp_path), json.dumps(sorted(numbers, reverse=True))]
    done = subprocess.run(call, capture_output=True, text=True, env=environment(PYTHONHASHSEED="12345"), timeout=400)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == here
    for name, made in here.items():
        assert len(set(made.values())) == len(made), f"{name}: different numbers are different batches"


@pytest.mark.parametrize("name", TASKS)
def test_another_seed_gives_other_batches(name: str, tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    source = open_source(config.data)
    one, other = (open_task(config.with_(train=config.train.with_(seed=seed)), source) for seed in (3, 4))
    assert [digest(one.batch(n)) for n in range(3)] != [digest(other.batch(n)) for n in range(3)]


# ------------------------------------------------------------------------------------- what is in them


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode([i for i in ids if i >= len(SPECIAL)])


def test_pairs_are_asked_for_once_an_epoch_each_token_after_those_before_it(tmp_path: Path) -> None:
    task = open_("translate", tmp_path, "data.joint_vocab=false")
    source, target = task.processor.source, task.processor.target
    assert isinstance(source, Tokenizer)
    assert isinstance(target, Tokenizer)
    for epoch in (0, 1):
        seen: Counter[tuple[str, str]] = Counter()
        for batch in epoch_of(task, epoch):
            tokens, read = batch.inputs
            assert torch.equal(batch.options["source_padding_mask"], tokens != source.pad_id)
            assert bool((read[:, 0] == target.bos_id).all())
            counted = 0
            for row, kept, wanted, given in zip(
                tokens, batch.options["source_padding_mask"], batch.targets, read, strict=True
            ):
                asked = wanted[wanted != IGNORE]
                length = len(asked)
                counted += length + int(kept.sum()) + 1  # <bos> is read, too
                assert int(asked[-1]) == target.eos_id
                assert torch.equal(given[1:length], asked[:-1])
                assert bool((wanted[length:] == IGNORE).all())
                assert bool((given[length + 1 :] == target.pad_id).all())
                assert int(row[kept][-1]) == source.eos_id
                seen[text_of(source, row.tolist()), text_of(target, asked.tolist())] += 1
            assert batch.n_targets == int((batch.targets != IGNORE).sum())
            assert batch.n_tokens == counted
            assert tokens.shape[0] * max(tokens.shape[1], read.shape[1]) <= 96 + 8 * tokens.shape[0]
        pairs = [x for x in task.source.train if isinstance(x, Pair)]
        assert seen == Counter((x.source, x.target) for x in pairs)


def test_packed_texts_ask_for_the_next_token_of_the_same_document(tmp_path: Path) -> None:
    task = open_("lm", tmp_path, "data.max_len=64", "model.max_len=64")
    tokenizer = task.processor.source
    assert isinstance(tokenizer, Tokenizer)
    written = [
        [tokenizer.eos_id, *tokenizer.encode(x.text, special=False), tokenizer.eos_id]
        for x in task.source.train
        if isinstance(x, Text)
    ]
    pieces: list[list[int]] = []
    for batch in epoch_of(task):
        tokens, documents = batch.inputs[0], batch.options["documents"]
        for row, ids, places, wanted in zip(tokens, documents, batch.options["positions"], batch.targets, strict=True):
            for number in range(int(ids.max()) + 1):
                at = ids == number
                mine, asked = row[at], wanted[at]
                assert torch.equal(places[at], torch.arange(len(mine)))
                assert torch.equal(asked[:-1], mine[1:])
                # A document that goes on in the next row is asked for its first token there.
                pieces.append([*mine.tolist(), int(asked[-1])])
            assert bool((wanted[ids < 0] == IGNORE).all())
    pieces = [piece if piece[-1] != IGNORE else piece[:-1] for piece in pieces]
    whole = {tuple(document) for document in written}
    found = sum(tuple(piece) in whole for piece in pieces)
    assert found > len(written) // 2, "most documents lie within one row"
    assert all(any(_within(piece, document) for document in written) for piece in pieces)
    assert sum(batch.n_tokens for batch in epoch_of(task)) == sum(map(len, written))
    assert sum(batch.n_targets for batch in epoch_of(task)) == sum(len(document) - 1 for document in written)


def _within(piece: list[int], document: list[int]) -> bool:
    return any(document[at : at + len(piece)] == piece for at in range(len(document) - len(piece) + 1))


@pytest.mark.parametrize("positions", ["rope", "learned", "alibi"])
def test_no_document_sees_another(positions: str, tmp_path: Path) -> None:
    """A token of one document is changed: nothing moves in the others of its row, nor before it in its own."""
    task = open_("lm", tmp_path, f"model.positions={positions}")
    model = build(task.model_config).eval()
    batch = task.batch(0)
    documents = batch.options["documents"][0]
    assert int(documents.max()) >= 1, "the row holds at least two documents"
    place = int((documents == 0).sum()) // 2
    changed = batch.inputs[0].clone()
    changed[0, place] = (changed[0, place] + 1 - len(SPECIAL)) % (model.config.vocab_size - len(SPECIAL)) + len(SPECIAL)
    with torch.no_grad():
        before, after = (model(tokens, **batch.options) for tokens in (batch.inputs[0], changed))
    moved = (before[0] != after[0]).any(-1)
    assert bool(moved[place])
    assert not bool(moved[:place].any())
    assert not bool(moved[documents != 0].any())
    assert torch.equal(before[1:], after[1:])


def test_a_single_text_is_cut_anywhere(tmp_path: Path) -> None:
    task = open_("lm", tmp_path, "data.documents=whole", "data.packing=blocks")
    batch = task.batch(0)
    assert batch.options == {}
    assert torch.equal(batch.inputs[0][:, 1:], batch.targets[:, :-1])
    assert batch.n_targets == batch.n_tokens == batch.targets.numel() == 4 * 24


def test_masked_texts_ask_for_what_was_hidden_and_nothing_else(tmp_path: Path) -> None:
    task = open_("mlm", tmp_path, "data.mask_rate=0.3", "train.batch_tokens=480")
    plain = open_("lm", tmp_path, "train.batch_tokens=480")
    asked = masked = same = total = 0
    for number in range(task.batches_per_epoch):
        batch, original = task.batch(number), plain.batch(number).inputs[0]
        hidden = batch.targets != IGNORE
        assert torch.equal(batch.targets[hidden], original[hidden])
        assert torch.equal(batch.inputs[0][~hidden], original[~hidden])
        assert not bool((original[hidden] < len(SPECIAL)).any()), "special tokens are never asked for"
        assert torch.equal(batch.options["padding_mask"], plain.batch(number).options["documents"] >= 0)
        asked += int(hidden.sum())
        masked += int((batch.inputs[0][hidden] == MASK).sum())
        same += int((batch.inputs[0][hidden] == original[hidden]).sum())
        total += int((original >= len(SPECIAL)).sum())
    # Of n independent draws with rate p a share lies within 5 √(p(1-p)/n) of p.
    assert asked / total == pytest.approx(0.3, abs=5 * math.sqrt(0.3 * 0.7 / total))
    assert masked / asked == pytest.approx(0.8, abs=5 * math.sqrt(0.8 * 0.2 / asked))
    assert same / asked == pytest.approx(0.1 + 0.1 / 20, abs=5 * math.sqrt(0.1 * 0.9 / asked))


def test_texts_and_their_classes(tmp_path: Path) -> None:
    task = open_("classify", tmp_path, "data.hide_rate=0")
    tokenizer, labels = task.processor.source, task.processor.labels
    assert isinstance(tokenizer, Tokenizer)
    assert labels == ("even", "odd")
    seen: Counter[tuple[str, int]] = Counter()
    for batch in epoch_of(task):
        (tokens,) = batch.inputs
        keep = batch.options["padding_mask"]
        assert torch.equal(keep, tokens != tokenizer.pad_id)
        assert batch.n_tokens == int(keep.sum())
        assert batch.n_targets == len(tokens) == len(batch.targets)
        for row, kept, label in zip(tokens, keep, batch.targets.tolist(), strict=True):
            ids = row[kept].tolist()
            assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
            seen[text_of(tokenizer, ids), label] += 1
    assert seen == Counter((x.text, x.label) for x in task.source.train if isinstance(x, Labelled))


@pytest.mark.parametrize("name", ["classify", "translate"])
def test_hidden_tokens_are_as_many_as_asked_others_each_epoch_and_none_when_it_counts(
    name: str, tmp_path: Path
) -> None:
    plain, task = (open_(name, tmp_path, f"data.hide_rate={rate}") for rate in (0, 0.25))
    gone = total = 0
    patterns = []
    for epoch in (0, 1):
        pattern = []
        for number in range(task.batches_per_epoch):
            at = epoch * task.batches_per_epoch + number
            batch, original = task.batch(at), plain.batch(at)
            hidden = batch.inputs[0] != original.inputs[0]
            assert bool((batch.inputs[0][hidden] == MASK).all())
            assert not bool((original.inputs[0][hidden] < len(SPECIAL)).any())
            assert torch.equal(batch.targets, original.targets)
            assert all(torch.equal(x, y) for x, y in zip(batch.inputs[1:], original.inputs[1:], strict=True))
            gone += int(hidden.sum())
            total += int((original.inputs[0] >= len(SPECIAL)).sum())
            pattern.append(hidden)
        patterns.append(pattern)
    assert gone / total == pytest.approx(0.25, abs=5 * math.sqrt(0.25 * 0.75 / total))
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(*patterns, strict=True))
    held = zip(task.valid_batches(task.source.valid), plain.valid_batches(plain.source.valid), strict=True)
    assert all(digest(one) == digest(other) for one, other in held)


def test_images_and_their_classes(tmp_path: Path) -> None:
    task = open_("classify-images", tmp_path)
    seen: Counter[int] = Counter()
    for batch in epoch_of(task):
        (pixels,) = batch.inputs
        assert pixels.shape[1:] == (1, 8, 8)
        assert batch.n_tokens == len(pixels) * 4
        assert len(pixels) <= 4
        # Bright ones lie above the middle, which is 0 here, dark ones below it.
        assert torch.equal((pixels.mean((1, 2, 3)) < 0).long(), batch.targets)
        seen.update(batch.targets.tolist())
    labels = Counter(x.label for x in task.source.train if isinstance(x, ImageExample))
    assert task.processor.labels == ("bright", "dark")
    assert seen == labels


def test_an_epoch_shows_each_image_once_and_its_captions_in_turn(tmp_path: Path) -> None:
    task = open_("caption", tmp_path)
    tokenizer = task.processor.target
    assert isinstance(tokenizer, Tokenizer)
    examples = [x for x in (task.source.train[i] for i in range(12)) if isinstance(x, ImageExample)]
    told: list[Counter[str]] = []
    for epoch in range(2):
        said: Counter[str] = Counter()
        for batch in epoch_of(task, epoch):
            pixels, read = batch.inputs
            assert bool((read[:, 0] == tokenizer.bos_id).all())
            for given, wanted in zip(read, batch.targets, strict=True):
                asked = wanted[wanted != IGNORE]
                assert torch.equal(given[1 : len(asked)], asked[:-1])
                assert int(asked[-1]) == tokenizer.eos_id
                said[text_of(tokenizer, asked.tolist())] += 1
            assert batch.n_tokens == len(pixels) * (64 + 1) + batch.n_targets
        told.append(said)
    for epoch, said in enumerate(told):
        assert said == Counter(x.captions[(epoch + i) % len(x.captions)] for i, x in enumerate(examples))


# ------------------------------------------------------------------------------------- what is too long


@pytest.mark.parametrize("fate", ["auto", "drop", "truncate"])
def test_pairs_that_are_too_long_are_counted_and_dropped_or_cut(fate: str, tmp_path: Path) -> None:
    task = open_("translate", tmp_path, "data.max_len=7", f"data.too_long={fate}", "data.joint_vocab=false")
    source, target = task.processor.source, task.processor.target
    assert isinstance(source, Tokenizer)
    assert isinstance(target, Tokenizer)
    pairs = [x for x in task.source.train if isinstance(x, Pair)]
    longer = sum(len(source.encode(x.source)) > 7 or len(target.encode(x.target)) + 1 > 7 for x in pairs)
    assert 0 < longer < len(pairs)
    batches = epoch_of(task)
    rows = sum(len(batch.targets) for batch in batches)
    assert rows == (len(pairs) if fate == "truncate" else len(pairs) - longer)
    done = "cut short" if fate == "truncate" else "left out"
    assert task.skipped.to_text() == f"{longer} examples longer than max_len=7 {done}"
    assert all(int(batch.options["source_padding_mask"].sum(1).max()) <= 7 for batch in batches)
    ends = [row[row != IGNORE][-1] for batch in batches for row in batch.targets]
    assert {int(end) for end in ends} == {target.eos_id}


def test_texts_that_are_too_long_are_cut_and_counted(tmp_path: Path) -> None:
    task = open_("classify", tmp_path, "data.max_len=6")
    batches = epoch_of(task)
    tokenizer = task.processor.source
    assert isinstance(tokenizer, Tokenizer)
    longer = sum(len(tokenizer.encode(x.text)) > 6 for x in task.source.train if isinstance(x, Labelled))
    assert task.skipped.to_text() == f"{longer} examples longer than max_len=6 cut short"
    assert sum(len(batch.targets) for batch in batches) == len(task.source.train)
    assert max(int(batch.options["padding_mask"].sum(1).max()) for batch in batches) == 6


def test_a_validation_cut_short_says_nothing_about_training(tmp_path: Path) -> None:
    task = open_("caption", tmp_path, "data.max_target_len=6")
    before = task.skipped
    next(task.valid_groups(task.source.valid))
    assert task.n_held_out_cut > 0
    assert task.skipped == before


@pytest.mark.parametrize("name", ["classify", "caption"])
def test_texts_and_captions_that_are_too_long_may_be_left_out(name: str, tmp_path: Path) -> None:
    task = open_(name, tmp_path, "data.max_len=6", "data.too_long=drop")
    tokenizer = task.processor.source or task.processor.target
    assert isinstance(tokenizer, Tokenizer)
    texts = [x.captions if name == "caption" else [x.text] for x in task.source.train]  # type: ignore[union-attr]
    longer = [[len(tokenizer.encode(text)) > 6 for text in some] for some in texts]
    batches = epoch_of(task)
    assert task.skipped.to_text() == f"{sum(map(sum, longer))} examples longer than max_len=6 left out"
    assert 0 < sum(len(batch.targets) for batch in batches) == sum(not all(some) for some in longer) < len(texts)


def test_nothing_too_long_is_nothing_to_say(tmp_path: Path) -> None:
    task = open_("translate", tmp_path)
    task.batch(0)
    assert task.skipped.to_text() is None


# ------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("name", ["translate", "classify", "lm"])
def test_an_evaluation_is_what_one_computes_by_hand(name: str, tmp_path: Path) -> None:
    """Example by example, without batches or padding, from the logits; texts as one row each where they fit one."""
    more = ("data.packing=documents", "data.max_len=64", "model.max_len=64") if name == "lm" else ()
    task = open_(name, tmp_path, *more)
    torch.manual_seed(1)
    model = build(task.model_config).double().eval()
    model.processor = task.processor
    objective = Objective(model, smoothing=0.3).eval()  # smoothing is for training alone
    with torch.no_grad():
        found = task.validate(model, objective, n_examples=0)
    source = task.processor.source
    assert isinstance(source, Tokenizer)
    total, count, right = 0.0, 0, 0
    for example in task.source.valid:
        with torch.no_grad():
            if isinstance(example, Pair):
                target = task.processor.target or source
                assert isinstance(target, Tokenizer)
                ids = torch.tensor([[target.bos_id, *target.encode(example.target)]])
                logits = model(torch.tensor([source.encode(example.source)]), ids[:, :-1])[0]
                wanted = ids[0, 1:]
            elif isinstance(example, Labelled):
                logits = model(torch.tensor([source.encode(example.text)]))
                wanted = torch.tensor([example.label])
                right += int(logits.argmax() == wanted)
            else:
                assert isinstance(example, Text)
                ids = torch.tensor([[source.eos_id, *source.encode(example.text, special=False), source.eos_id]])
                logits, wanted = model(ids[:, :-1])[0], ids[0, 1:]
        total += float(F.cross_entropy(logits, wanted, reduction="sum"))
        count += len(wanted)
    # Documents that two rows share are seen in two parts; everything else is the same to rounding.
    tolerance = 0.05 if name == "lm" else 1e-9
    assert found["valid_loss"] == pytest.approx(total / count, rel=tolerance)
    if name != "classify":
        assert found["perplexity"] == pytest.approx(math.exp(float(found["valid_loss"])))
    else:
        with torch.no_grad():
            again = task.validate(model, objective)
            _, rows = task.answers(model, task.source.valid, beam=1, length_penalty=1.0)
        assert again["accuracy"] == right / len(task.source.valid)
        assert [row.target for row in rows] == [
            task.source.labels[x.label] for x in task.source.valid if isinstance(x, Labelled) and task.source.labels
        ]


def test_every_held_out_token_counts_once(tmp_path: Path) -> None:
    task = open_("lm", tmp_path)
    tokenizer = task.processor.source
    assert isinstance(tokenizer, Tokenizer)
    expected = sum(len(tokenizer.encode(x.text, special=False)) + 1 for x in task.source.valid if isinstance(x, Text))
    assert sum(batch.n_targets for batch in task.valid_batches(task.source.valid)) == expected


def test_a_limit_of_batches_is_kept(tmp_path: Path) -> None:
    task = open_("translate", tmp_path)
    asked: list[int] = []

    def loss_of(batch: Batch) -> torch.Tensor:
        asked.append(batch.n_targets)
        return torch.tensor(float(batch.n_targets))

    model = build(task.model_config).eval()
    assert task.validate(model, loss_of, n_batches=1, n_examples=0)["valid_loss"] == 1.0
    assert len(asked) == 1


def test_a_source_of_another_kind_is_refused(tmp_path: Path) -> None:
    config = config_of("lm", tmp_path, f"data={write_data('translate', tmp_path)}", "data.documents=whole")
    with pytest.raises(ValueError, match=r"pairs\.tsv holds pairs of texts, but task 'lm' learns from plain text"):
        open_task(config, open_source(config.data))


# ------------------------------------------------------------------------------------- bad lines


@pytest.fixture
def spoiled(tmp_path: Path) -> Path:
    """A file of pairs with one bad line of each sort, the sixth to the ninth."""
    good = Path(write_data("translate", tmp_path)).read_bytes().splitlines()
    chosen = random.Random(0)
    words = "".join(chosen.choice("abcdefgh ") for _ in range(1_000_000)).encode()
    bad = [b"one column", b"caf\xe9\tKaffee", b"\tnichts", words + b"\tlang"]
    path = tmp_path / "spoiled.tsv"
    path.write_bytes(b"\n".join([*good[:5], *bad, *good[5:]]) + b"\n")
    return path


def test_bad_lines_are_listed_one_by_one_and_nothing_is_trained(
    spoiled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of("translate", str(spoiled), f"train.out={tmp_path / 'run'}", "train.steps=1")
    assert cli.main(["train", "translate", *words]) == 1
    head, *lines = capsys.readouterr().err.splitlines()
    assert head == "regard: 4 bad lines of 64; data.bad_lines=skip leaves them out"
    places = [line.partition(": ")[0] for line in lines]
    assert places == [f"{spoiled}:{number}" for number in (6, 7, 8, 9)]
    reasons = [line.partition(": ")[2] for line in lines]
    for reason, word in zip(reasons, ("column", "UTF-8", "empty", "1,000,006 bytes"), strict=True):
        assert word in reason
    assert max(map(len, lines)) < 300, "a line of a million characters is not printed"
    assert not (tmp_path / "run").exists()


def test_bad_lines_are_left_out_when_told_to_and_never_silently(
    spoiled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "run"
    words = words_of("translate", str(spoiled), f"train.out={out}", "train.steps=1", "data.bad_lines=skip")
    assert cli.main(["train", "translate", *words]) == 0
    said = caplog.text + capsys.readouterr().err
    assert said.count("4 bad lines of 64; left out, as bad_lines='skip' says") == 1
    assert all(f"{spoiled}:{number}: " in said for number in (6, 7, 8, 9))
    facts = json.loads((out / "provenance.json").read_bytes())["data"]
    assert (facts["lines"]["bad"], facts["train"] + facts["valid"]) == (4, 60)
    assert sum(facts["lines"]["reasons"].values()) == 4
    assert latest(out).step == 1
    assert metrics(out)


def test_too_long_examples_are_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = write_data("translate", tmp_path), tmp_path / "run"
    words = words_of("translate", data, f"train.out={out}", "train.steps=1", "data.max_len=7")
    assert cli.main(["train", "translate", *words]) == 0
    assert "examples longer than max_len=7 left out" in capsys.readouterr().err


# ------------------------------------------------------------------- a tokenizer whose padding also occurs in texts


def foreign_tokenizer() -> Tokenizer:
    """One that adds no special token and has none for padding, like GPT-2's: id 0, the default, is the word "!"."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    words = ["!", "a", "b", "c", "d", "</s>", "<unk>"]
    backend = Backend(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]  # its stubs do not know setters
    return Tokenizer(backend.to_str().encode()).with_special_ids(pad=0, bos=5, eos=5, unk=6)


def open_foreign(task: str, folder: Path, lines: list[str], *more: str, labels: tuple[str, ...] | None = None) -> Task:
    path = folder / ("data.conll" if task == "tag" else "data.tsv")
    path.write_text("\n".join(lines * 10) + "\n", encoding="utf-8")
    sizes = ("model.d_model=16", "model.n_heads=2", "model.d_ff=16", "model.n_layers=1", "data.max_len=8")
    config = run_config(task, [f"data={path}", f"data.valid={path}", "train.device=cpu", *sizes, *more])
    return open_task(config, open_source(config.data), Processor(source=foreign_tokenizer(), labels=labels))


def test_a_word_with_the_id_of_padding_is_read_and_learned(tmp_path: Path) -> None:
    lines = ["a ! b\t! c", "a\tb", "b\tc", "c a\td"]
    pairs = [Pair("a ! b", "! c"), Pair("a", "b")]
    task = open_foreign("translate", tmp_path, lines, "data.kind=pairs")
    ((_, batch),) = task.valid_groups(pairs)
    assert batch.options["source_padding_mask"].tolist() == [[True] * 4, [True] * 2 + [False] * 2]
    assert batch.inputs[1].tolist() == [[5, 0, 3, 5], [5, 2, 5, 0]]
    assert batch.targets.tolist() == [[0, 3, 5, IGNORE], [2, 5, IGNORE, IGNORE]]
    task = open_foreign("embed", tmp_path, lines, "data.kind=pairs")
    ((_, batch),) = task.valid_groups(pairs)
    assert batch.options["padding_mask"].sum(1).tolist() == [3, 1, 2, 1]
    task = open_foreign(
        "classify", tmp_path, ["a !\tx", "b\ty", "c\tx", "d\ty"], "data.kind=labelled", labels=("x", "y")
    )
    ((_, batch),) = task.valid_groups([Labelled("! a !", 0), Labelled("b", 1)])
    assert batch.options["padding_mask"].sum(1).tolist() == [3, 1]


def test_a_caption_may_contain_the_token_of_padding(tmp_path: Path) -> None:
    config = config_of("caption", tmp_path)
    image = open_task(config, source := open_source(config.data)).processor.image
    task = open_task(config, source, Processor(target=foreign_tokenizer(), image=image))
    picture = source.train[0].image  # type: ignore[union-attr]  # a caption's example
    ((_, batch),) = task.valid_groups([ImageExample(picture, ("! a",)), ImageExample(picture, ("b",))])
    assert batch.targets.tolist()[0][:3] == [0, 1, 5]
    assert (batch.targets != IGNORE).sum(1).tolist() == [3, 2]


def test_the_last_word_has_a_tag_without_special_tokens_too(tmp_path: Path) -> None:
    task = open_foreign("tag", tmp_path, ["a X", "b O", ""], labels=("O", "X"))
    ((_, batch),) = task.valid_groups([Tagged(("a", "b"), (1, 0)), Tagged(("a",) * 9, (1,) * 9)])
    assert batch.targets[1].tolist() == [1, 0, *[IGNORE] * 6]
    assert batch.targets[0].tolist() == [*[1] * 7, IGNORE], "of a sentence that is cut, the last token is its end"


def test_sentences_with_tags_that_are_too_long_are_cut_or_dropped(tmp_path: Path) -> None:
    lines = ["a X", "b O", "", *["a X"] * 9, ""]
    for how, dropped, cut in (("auto", 0, 10), ("drop", 10, 0)):
        task = open_foreign("tag", tmp_path, lines, f"data.too_long={how}", "data.hide_rate=0", labels=("O", "X"))
        sizes = {int(batch.n_tokens / len(batch.inputs[0])) for batch in map(task.batch, range(task.batches_per_epoch))}
        assert (task.skipped.n_dropped, task.skipped.n_cut) == (dropped, cut)
        assert (max(sizes) == 2) == (how == "drop")


def test_a_source_that_is_cut_keeps_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = open_foreign("translate", tmp_path, ["a\tb", "b\tc", "c a\td"], "data.kind=pairs", "model.max_len=8")
    read: list[list[int]] = []
    plain = translation.generate

    def generate(model: Any, rows: Any, config: Any) -> Any:
        read.extend(rows)
        return plain(model, rows, config)

    monkeypatch.setattr(translation, "generate", generate)
    task.translate(build(task.model_config).eval(), ["a b " * 9], beam=1)  # type: ignore[attr-defined]  # Translate has it
    assert read == [[1, 2, 1, 2, 1, 2, 1, 5]]
