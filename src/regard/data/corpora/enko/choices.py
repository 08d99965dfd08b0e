"""What may be chosen where: verbs by frame, moods and what people do about them, things and the places they are in."""

from __future__ import annotations

from .adverbs import DEGREES, FREQUENCIES, RELATIONS, TIMES
from .lexicon import ADJECTIVES, NOUNS, VERBS, Adjective, Frame, Noun, Verb

__all__ = [
    *("ACTIVITIES", "COMPARED", "CONTRASTED", "EVERYDAY", "FOR_OTHERS", "FRAMES", "MAIN_ONLY", "NEWS"),
    *("ANSWERS", "MOODS", "PREDICATIVE", "SKIES", "SLIGHT"),
    *("ANIMALS", "GROUPS", "JOBS", "LITTLE_ANIMALS", "PEOPLE", "SMALL"),
    *("ROOMY", "SPOTS", "SURFACES", "TOPS", "WHERE_ANIMALS_ARE", "WHERE_THINGS_ARE"),
    *("ALL_DEGREES", "ALL_FREQUENCIES", "ALL_RELATIONS", "FAR_RIDES", "NEAR_RIDES", "NEAR_TIMES", "TIMES_OF"),
]

# ------------------------------------------------------------------------------------------------ verbs

_FRAME_NAMES: tuple[Frame, ...] = ("transitive", "intransitive", "motion", "ditransitive", "weather")
FRAMES: dict[Frame, tuple[Verb, ...]] = {
    frame: tuple(verb for verb in VERBS.values() if verb.frame == frame) for frame in _FRAME_NAMES
}
ACTIVITIES = tuple(
    verb
    for frame in _FRAME_NAMES[:-1]
    for verb in FRAMES[frame]
    if not verb.marks & {"state", "thetic"} and not verb.doers
)
"""What people do."""
CONTRASTED = tuple(
    verb
    for verb in ACTIVITIES
    if verb.frame in ("transitive", "motion") and len(verb.partners) > 5 and "asserted" not in verb.marks
)
"""What one may do with one thing and not with another."""
NEWS = tuple(VERBS[key] for key in ("begin", "end", "arrive", "depart", "ring", "stop"))
"""What happens and makes people do something."""
MAIN_ONLY = frozenset({"need", "have"})
"""Left out of embedded clauses: two phrases with 이/가 in a row can be read either way."""

_EVERYDAY = """
eat, drink, cook, make, bake, buy, read, write, watch, listen to, clean up, wash, wear, fix, draw, ride, drive, study,
play, meet, help, call, wait for, visit, open, close, turn on, turn off, leave, cross, carry, move, plant, pick up,
sleep, run, walk, laugh, sing, dance, work, rest, exercise, get up, go to, come to, return to, walk to, run to, enter,
climb, sit on, lie on, stay at, give to, send to, lend to, bring to, read to, borrow, lose, finish, prepare, learn,
teach
"""
EVERYDAY = tuple(VERBS[key.strip()] for key in _EVERYDAY.split(","))
"""What people do when it rains, when the class ends, and otherwise."""
FOR_OTHERS = tuple(
    VERBS[key]
    for key in (
        "call",
        "cook",
        "bake",
        "make",
        "prepare",
        "clean up",
        "bring to",
        "give to",
        "send to",
        "buy",
        "wait for",
    )
)
"""What people do because somebody else is sick or sad."""

# ------------------------------------------------------------------------------------------------ adjectives


def _predicative(word: Adjective) -> bool:
    return "only-before" not in word.marks


PREDICATIVE = tuple(word for word in ADJECTIVES.values() if _predicative(word))
MOODS = tuple(word for word in PREDICATIVE if "mood" in word.marks)
SKIES = tuple(word for word in PREDICATIVE if "weather" in word.partners)
COMPARED = frozenset(
    word.key for word in PREDICATIVE if not word.marks & {"mood", "only-after"} and word.key not in ("bad", "good")
)
SLIGHT = frozenset(
    {
        *(
            "tired",
            "busy",
            "sick",
            "sad",
            "hungry",
            "lonely",
            "difficult",
            "expensive",
            "heavy",
            "spicy",
            "boring",
            "dark",
        ),
        *(
            "noisy",
            "far",
            "dirty",
            "slow",
            "strange",
            "long",
            "short",
            "narrow",
            "cold",
            "hot",
            "big",
            "small",
            "thick",
            "thin",
        ),
    }
)
"""What may be `a little` or `too` so: saying it is a complaint."""
ANSWERS = {
    "tired": ("sleep", "rest", "lie on", "sit on", "return to"),
    "busy": ("run to", "work", "ride", "call", "drive", "finish"),
    "sick": ("rest", "sleep", "cough", "lie on", "call", "wait for"),
    "happy": ("sing", "dance", "laugh", "hug", "invite", "praise", "give to", "bake"),
    "sad": ("cry", "listen to", "drink", "walk", "read", "leave", "hug"),
    "hungry": ("eat", "cook", "bake", "make", "cut", "prepare"),
    "lonely": ("cry", "call", "meet", "visit", "raise", "send to", "invite", "wait for"),
}
"""What people do about a mood."""

# ------------------------------------------------------------------------------------------------ nouns


def _nouns(tag: str, without: str = "") -> tuple[str, ...]:
    """The nouns with a tag and with none of some others."""
    return tuple(noun.english for noun in NOUNS.values() if tag in noun.tags and _has_none(noun, without))


def _has_none(noun: Noun, tags: str) -> bool:
    return noun.tags.isdisjoint(tags.split())


PEOPLE = tuple(name for name in _nouns("person", "name") if name != "baby")
JOBS = _nouns("job")
GROUPS = _nouns("person", "kin name royal")
SMALL = _nouns("kept", "mass vehicle")
ANIMALS = _nouns("animal")
LITTLE_ANIMALS = ("cat", "dog", "puppy", "rabbit", "mouse", "bird", "turtle", "frog")
WHERE_ANIMALS_ARE = ("farm", "zoo", "garden", "park", "forest", "village", "island", "mountain")
WHERE_THINGS_ARE = ("room", "office", "classroom", "kitchen", "house", "store", "library", "hotel")
SPOTS = _nouns("place", "by on city")
TOPS = ("desk", "table", "bed", "chair", "sofa", "box", "piano", "car")
SURFACES = (*TOPS, "door", "window", "tree", "mirror")
ROOMY = ("box", "bag", "basket")
FAR_RIDES = ("train", "bus", "airplane", "car")
NEAR_RIDES = ("bus", "taxi", "bicycle", "car")

# ------------------------------------------------------------------------------------------------ adverbs and times

ALL_DEGREES, ALL_FREQUENCIES, ALL_RELATIONS = tuple(DEGREES), tuple(FREQUENCIES), tuple(RELATIONS)
TIMES_OF = {
    tense: tuple(time for time, (_, tenses) in TIMES.items() if tense in tenses.split())
    for tense in ("past", "present", "future", "now")
}
NEAR_TIMES = frozenset(
    {"yesterday", "last night", "this morning", "an hour ago", "today", "now", "tomorrow", "tonight", "soon"}
)
"""Times of events that are over in a moment: water does not boil last year."""
