"""shapes: captions against scenes made by hand, boxes against the pixels, and the promises of the splits."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from regard.data.corpora import fingerprint, open_corpus
from regard.data.corpora.shape_scenes import COLOURS, HELD_OUT, SHAPES, SIZES, Relation, Scene, Thing, box_of, draw
from regard.data.corpora.shapes import CaptionedScene, Shapes, caption, is_held_out_for_valid

PAPER = (240, 240, 240)


def thing(look: str, x: float = 0.5, y: float = 0.5, radius: float = 0.1) -> Thing:
    size, colour, shape = look.split()
    return Thing(size, colour, shape, x, y, radius, 0.0, (0, 0, 0))


def scene(kind: Any, *looks: str, relations: tuple[Relation, ...] = ()) -> Scene:
    return Scene(kind, tuple(thing(look) for look in looks), relations, PAPER)


# ------------------------------------------------------------------------------------------------ captions

RED, BLUE, GREEN = "small red circle", "large blue square", "large green star"
WRITTEN = [
    (scene("one", RED), "a small red circle", "작은 빨간 원 한 개"),
    (scene("counted", RED, RED), "two small red circles", "작은 빨간 원 두 개"),
    (
        scene("counted", BLUE, RED, RED),
        "two small red circles and a large blue square",
        "작은 빨간 원 두 개와 큰 파란 정사각형 한 개",
    ),
    (
        scene("counted", GREEN, BLUE, RED, RED),
        "two small red circles, a large green star and a large blue square",
        "작은 빨간 원 두 개, 큰 초록색 별 한 개와 큰 파란 정사각형 한 개",
    ),
    (scene("counted", *["small pink cross"] * 4), "four small pink crosses", "작은 분홍색 십자가 네 개"),
    (
        scene("two", RED, BLUE, relations=(Relation("left", 1),)),
        "a small red circle left of a large blue square",
        "큰 파란 정사각형 왼쪽에 있는 작은 빨간 원",
    ),
    (
        scene("two", RED, BLUE, relations=(Relation("inside", 1),)),
        "a small red circle inside a large blue square",
        "큰 파란 정사각형 안에 있는 작은 빨간 원",
    ),
    (
        scene("three", RED, BLUE, GREEN, relations=(Relation("right", 1), Relation("above", 2))),
        "a small red circle right of a large blue square and above a large green star",
        "큰 파란 정사각형 오른쪽, 큰 초록색 별 위에 있는 작은 빨간 원",
    ),
    (
        scene("three", "large black ring", "small yellow heart", "small orange diamond", relations=(
            Relation("left", 1), Relation("below", 2),
        )),
        "a large black ring left of a small yellow heart and below a small orange diamond",
        "작은 노란 하트 왼쪽, 작은 주황색 마름모 아래에 있는 큰 검은 고리",
    ),
    (
        scene("counted", *["large purple triangle"] * 3, "small purple triangle"),
        "three large purple triangles and a small purple triangle",
        "큰 보라색 삼각형 세 개와 작은 보라색 삼각형 한 개",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("made", "english", "korean"), WRITTEN, ids=[english for _, english, _ in WRITTEN])
def test_captions_written_by_hand(made: Scene, english: str, korean: str) -> None:
    assert caption(made, "en").text == english
    assert caption(made, "ko").text == korean


def test_each_word_speaks_of_its_things() -> None:
    counted = WRITTEN[2][0]
    assert caption(counted).things == ((1, 2),) * 4 + ((),) + ((0,),) * 4
    related = WRITTEN[7][0]
    english, korean = caption(related), caption(related, "ko")
    spoken = dict(zip(korean.text.split(), korean.things, strict=True))
    assert spoken["정사각형"] == (1,)
    assert spoken["오른쪽,"] == (0, 1)
    assert spoken["위에"] == (0, 2)
    assert spoken["있는"] == ()
    assert spoken["원"] == (0,)
    assert english.things == ((0,),) * 4 + ((0, 1),) * 2 + ((1,),) * 4 + ((),) + ((0, 2),) + ((2,),) * 4


# ------------------------------------------------------------------------------------------------ drawing


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tilt", [0.0, 9.0])
def test_a_box_is_where_the_pixels_are(shape: str, tilt: float) -> None:
    alone = Thing("large", "blue", shape, 0.41, 0.57, 0.15, tilt, (0, 0, 0))
    size = 256
    pixels = np.asarray(draw(Scene("one", (alone,), (), PAPER), size)).astype(int)
    inked = (np.abs(pixels - np.array(PAPER)).sum(axis=2) > 40).nonzero()
    found = (inked[1].min(), inked[0].min(), inked[1].max() + 1, inked[0].max() + 1)
    assert np.abs(np.array(found) - np.array(box_of(alone)) * size).max() <= 2.0


@pytest.mark.parametrize("colour", COLOURS)
def test_colours_are_told_apart(colour: str) -> None:
    def ink(name: str) -> np.ndarray[Any, Any]:
        pixels = draw(Scene("one", (thing(f"large {name} square"),), (), PAPER), 64)
        return np.asarray(pixels)[32, 32].astype(int)

    assert min(np.abs(ink(colour) - ink(other)).sum() for other in COLOURS if other != colour) > 60


def test_edges_are_anti_aliased() -> None:
    pixels = np.asarray(draw(Scene("one", (thing("large black circle"),), (), PAPER), 64))
    assert len(np.unique(pixels[..., 0])) > 8


def test_the_ring_has_a_hole_and_the_inner_thing_is_seen() -> None:
    pixels = np.asarray(draw(Scene("one", (thing("large red ring"),), (), PAPER), 64))
    assert tuple(pixels[32, 32]) == PAPER
    inner, outer = thing("small red circle", radius=0.08), thing("large blue square", radius=0.22)
    nested = np.asarray(draw(Scene("two", (inner, outer), (Relation("inside", 1),), PAPER), 64))
    assert nested[32, 32, 0] > 180 > nested[22, 22, 0]


# ------------------------------------------------------------------------------------------------ the corpus


@pytest.fixture(scope="module")
def corpus() -> Shapes:
    return Shapes()


@pytest.fixture(scope="module")
def pictures(corpus: Shapes) -> dict[str, list[CaptionedScene]]:
    return {
        "train": [corpus.example("train", index) for index in range(6000)],
        "valid": [corpus.example("valid", index) for index in range(400)],
        "combinations": [corpus.example("combinations", index) for index in range(1000)],
    }


def test_an_example_depends_on_its_place_alone(corpus: Shapes) -> None:
    places = [(split, index) for split in corpus.splits for index in (0, 5, 10**12)]
    forwards = [corpus.example(*place) for place in places]
    assert forwards == [open_corpus("shapes").example(*place) for place in reversed(places)][::-1]
    assert all(np.array_equal(picture.image, picture.image) for picture in forwards)
    assert fingerprint(corpus, 4) == fingerprint(Shapes(), 4)
    # Runs recorded this as the hash of their data.
    assert fingerprint(corpus) == "4c8b227a738330f2b97e6ee8a8e3d641d245b998e38dbb69ed9e43f490a51bf5"


@pytest.mark.parametrize(
    ("split", "said"),
    [
        ("train", "a large yellow heart left of a large purple diamond and right of a small yellow circle"),
        ("valid", "a small orange circle above a small pink heart"),
        ("combinations", "a small orange diamond"),
    ],
)
def test_an_index_means_the_same_everywhere(corpus: Shapes, split: str, said: str) -> None:
    # A change that alters these alters every run that names its data by index: raise _EDITION with it.
    assert corpus.example(split, 0).caption == said


def test_images_are_pixels(corpus: Shapes) -> None:
    picture = corpus.example("train", 0)
    assert picture.image.shape == (64, 64, 3)
    assert picture.image.dtype == np.uint8
    assert Shapes(size=96).example("train", 0).image.shape == (96, 96, 3)
    assert Shapes(size=96).example("train", 0).boxes == tuple(
        tuple(value * 1.5 for value in box) for box in picture.boxes
    )
    korean = Shapes("ko").example("train", 0)
    assert korean.caption == picture.korean.text != picture.caption


def pairs_of(picture: CaptionedScene) -> set[tuple[str, str]]:
    return {(thing.colour, thing.shape) for thing in picture.scene.things}


def test_combinations_are_held_out(pictures: dict[str, list[CaptionedScene]]) -> None:
    assert len(HELD_OUT) == len(SHAPES)
    for split in ("train", "valid"):
        assert not any(pairs_of(picture) & HELD_OUT for picture in pictures[split])
    assert all(len(pairs_of(picture) & HELD_OUT) == 1 for picture in pictures["combinations"])
    assert set.union(*(pairs_of(picture) & HELD_OUT for picture in pictures["combinations"])) == HELD_OUT
    trained = set.union(*map(pairs_of, pictures["train"]))
    assert trained == {(colour, shape) for colour in COLOURS for shape in SHAPES} - HELD_OUT


def test_valid_has_compositions_of_its_own(pictures: dict[str, list[CaptionedScene]]) -> None:
    def composition(picture: CaptionedScene) -> tuple[object, ...]:
        return picture.scene.kind, *sorted(thing.traits for thing in picture.scene.things)

    assert not {composition(p) for p in pictures["train"]} & {composition(p) for p in pictures["valid"]}
    assert all(is_held_out_for_valid(picture.scene) for picture in pictures["valid"])


def test_scenes_have_what_captions_need(pictures: dict[str, list[CaptionedScene]]) -> None:
    train = pictures["train"]
    assert {len(picture.scene.things) for picture in train} == {1, 2, 3, 4}
    assert {picture.scene.kind for picture in train} == {"one", "counted", "two", "three"}
    sides = {relation.side for picture in train for relation in picture.scene.relations}
    assert sides == {"left", "right", "above", "below", "inside"}
    assert sum(len(picture.scene.things) >= 3 for picture in train) > 0.4 * len(train)
    words = {word.strip(",") for picture in train for word in picture.caption.split()}
    assert {"a", "two", "three", "four", "and", "left", "right", "of", "above", "below", "inside"} <= words
    assert set(SIZES) | set(COLOURS) | set(SHAPES) <= words


def test_relations_are_to_be_seen(pictures: dict[str, list[CaptionedScene]]) -> None:
    for picture in (picture for split in pictures.values() for picture in split):
        first = picture.scene.things[0]
        for relation in picture.scene.relations:
            other = picture.scene.things[relation.other]
            dx, dy = other.x - first.x, other.y - first.y
            if relation.side == "inside":
                (x0, y0, x1, y1), (X0, Y0, X1, Y1) = box_of(first), box_of(other)
                assert X0 < x0 < x1 < X1
                assert Y0 < y0 < y1 < Y1
                continue
            main, across = {"left": (dx, dy), "right": (-dx, dy), "above": (dy, dx), "below": (-dy, dx)}[relation.side]
            assert main > 0.2
            assert abs(across) < 0.25 * main
    # Of two things the smaller one is the subject, of equals the left or the upper one.
    for picture in pictures["train"]:
        if picture.scene.kind == "two":
            first, second = picture.scene.things
            assert (first.size, second.size) != ("large", "small")
            assert first.size != second.size or picture.scene.relations[0].side in ("left", "above")


def test_things_keep_apart_and_in_the_picture(pictures: dict[str, list[CaptionedScene]]) -> None:
    for picture in pictures["train"][:2000]:
        boxes = [box_of(thing) for thing in picture.scene.things]
        assert all(-0.001 <= value <= 1.001 for box in boxes for value in box)
        inside = {relation.other for relation in picture.scene.relations if relation.side == "inside"}
        for a in range(len(boxes)):
            for b in range(a):
                things = picture.scene.things[a], picture.scene.things[b]
                apart = np.hypot(things[0].x - things[1].x, things[0].y - things[1].y)
                assert inside & {a, b} or apart >= things[0].radius + things[1].radius + 0.015


def test_counted_scenes_repeat_and_related_ones_do_not(pictures: dict[str, list[CaptionedScene]]) -> None:
    for picture in pictures["train"]:
        looks = [thing.traits for thing in picture.scene.things]
        assert (len(set(looks)) < len(looks)) == (picture.scene.kind == "counted")
        assert len(picture.words.text.split()) == len(picture.words.things)


def test_errors(corpus: Shapes) -> None:
    with pytest.raises(ValueError, match="language='fr' is not one of en, ko"):
        Shapes("fr")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="size=8 is too small"):
        Shapes(size=8)
    with pytest.raises(ValueError, match="split='longer' is not one of train, valid, combinations"):
        corpus.example("longer", 0)


@pytest.mark.serial
def test_five_hundred_images_a_second(corpus: Shapes) -> None:
    start = time.process_time()
    for index in range(500):
        assert corpus.example("train", index).image.any()
    assert 500 / (time.process_time() - start) > 500
