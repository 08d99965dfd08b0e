"""Ways to spoil a file: bytes changed, cut, copied and moved; values of a document replaced by odd ones."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

# Strings among them lead out of a directory, name code, or are no text; numbers are too large, too small, or no size.
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 255, 2**16, 2**31 - 1, 2**31, 2**63, -(2**63), 10**18, 10**30),
    *(0.5, -0.0, 1e-320, 1e308, -1e308, "", " ", "0", "-1", "1e999", "NaN", "\0", "\ud800", "é" * 300, "x" * 5000),
    *("../secret.json", "/etc/passwd", "..\\secret.json", "file:///etc/passwd", "evil:Payload", "evil.Payload"),
    *("os:system", "builtins.eval", "__class__", "{{ 7 * 7 }}", "%s%s%n", "<script>", "hf:evil/evil", "~"),
    *([], {}, [[]], [None], [0], ["x"] * 50, {"": {}}, {"__class__": "evil"}, {"a": {"b": {"c": [1, 2]}}}),
)
_ODD_INTEGERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1)
_ODD_TEXTS = (
    b"\0",
    b"\xff",
    b"\xed\xa0\x80",
    b'"',
    b"\t",
    b"\n",
    b"\r",
    b",",
    b"{" * 50,
    b"[" * 3000,
    b"NaN",
    b"1e999",
)


def spoil_bytes(content: bytes, chosen: random.Random) -> bytes:
    """One to four changes of bytes, half of them near the start or the end, where formats keep what they are."""
    spoiled = bytearray(content)
    for _ in range(chosen.randint(1, 4)):
        n = len(spoiled)
        place = chosen.choice((chosen.randint(0, min(n, 64)), max(0, n - chosen.randint(0, 64)), chosen.randint(0, n)))
        length = chosen.choice((1, 2, 4, 8, 16, 100, chosen.randint(0, n)))
        match chosen.randrange(8):
            case 0:
                spoiled[place : place + 1] = bytes([chosen.randrange(256)])
            case 1:
                number = chosen.choice(_ODD_INTEGERS)
                raw = struct.pack(chosen.choice("<>") + "Q", number)
                size = chosen.choice((1, 2, 4, 8))
                spoiled[place : place + size] = raw[:size] if raw[0] else raw[-size:]
            case 2:
                del spoiled[place:]
            case 3:
                del spoiled[place : place + length]
            case 4:
                spoiled[place:place] = chosen.randbytes(min(length, 4096))
            case 5:
                spoiled[place:place] = spoiled[(start := chosen.randint(0, n)) : start + min(length, 4096)]
            case 6:
                spoiled[place : place + length] = chosen.randbytes(min(length, n - place))
            case 7:
                spoiled[place:place] = chosen.choice(_ODD_TEXTS)
    return bytes(spoiled)


def spoil_document(document: Any, chosen: random.Random) -> Any:
    """One to three values of a JSON document replaced, removed, renamed or added."""
    for _ in range(chosen.choice((1, 1, 1, 2, 3))):
        places = list(_places(document))
        if not places:
            return chosen.choice(ODD_VALUES)
        holder, key = chosen.choice(places)
        match chosen.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[chosen.choice([x for x in ODD_VALUES if isinstance(x, str)])] = holder.pop(key)
            case 2:
                other, name = chosen.choice(places)
                holder[key] = json.loads(json.dumps(other[name]))
            case 3 if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
                holder[key] = chosen.choice((-holder[key], holder[key] + 1, holder[key] * 1000, str(holder[key])))
            case _:
                holder[key] = json.loads(json.dumps(chosen.choice(ODD_VALUES)))
    return document


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Every value in a document, as what holds it and its key there."""
    found, waiting = [], [document]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            found.append((holder, key))
            if isinstance(holder[key], dict | list):
                waiting.append(holder[key])
    return found


def spoil_json(content: bytes, chosen: random.Random) -> bytes:
    """Its values three times out of four, else its bytes."""
    if chosen.random() < 0.25:
        return spoil_bytes(content, chosen)
    return json.dumps(spoil_document(json.loads(content), chosen)).encode()


def spoil_jsonl(content: bytes, chosen: random.Random) -> bytes:
    """One line as a document, else bytes."""
    if chosen.random() < 0.25:
        return spoil_bytes(content, chosen)
    lines = content.splitlines()
    number = chosen.randrange(len(lines))
    lines[number] = json.dumps(spoil_document(json.loads(lines[number]), chosen)).encode()
    return b"\n".join(lines)


def spoil_safetensors(content: bytes, chosen: random.Random) -> bytes:
    """The header as a document, else bytes."""
    if chosen.random() < 0.4:
        return spoil_bytes(content, chosen)
    (length,) = struct.unpack("<Q", content[:8])
    text = json.dumps(spoil_document(json.loads(content[8 : 8 + length]), chosen)).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]
