"""Conversion of SentencePiece models (Kudo & Richardson 2018) to a ``Tokenizer`` with the same ids.

A ``.model`` file is a protocol buffer: the pieces with their scores and types, the normalisation, the special ids.
Unigram and BPE models become a tokenizer.json that the ``tokenizers`` library runs, so that the sentencepiece package
is not needed. SentencePiece writes a space as ▁, prepends one to the text, and lets pieces cross words; here the
normaliser does the first two, and the whole text is a single word to the model. Special tokens that the file lacks
get the ids after its own. The ids differ in one case: a combining mark after a character that the normalisation
replaces is lost.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.data_config import TOKENIZER_FILES
from ..errors import BadData
from ..foundation.files import read_input
from .tokenizer import SPACE, Tokenizer
from .tokenizer_training import TOKENIZER_KINDS, Template, set_template

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of a piece
_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
_MISSING_NAMES = {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "mask": "<mask>"}
_COMPOSING = ("nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf")  # normalisations that also compose characters


@dataclass(frozen=True)
class SentencePieceModel:
    """The content of a ``.model`` file."""

    pieces: list[tuple[str, float, int]]  # text, score, type
    model_type: str
    special_ids: dict[str, int]  # pad, bos, eos and unk, as far as the file has them
    normalizer: str = "identity"
    charsmap: bytes = b""  # SentencePiece's compiled table of character replacements
    dummy_prefix: bool = True
    removes_spaces: bool = True  # strip spaces at both ends and collapse runs of them
    byte_fallback: bool = False

    @classmethod
    def parse(cls, content: bytes, name: str) -> SentencePieceModel:
        """Read the fields that affect encoding; raise BadData if the file is not a supported SentencePiece model."""
        try:
            fields = list(_fields(content))
            pieces = [_piece(value) for number, value in fields if number == 1]
            trainer, normalizer = (dict(_fields(b"".join(v for n, v in fields if n == number))) for number in (2, 3))
            types = [kind for _, _, kind in pieces]
            unknown = types.index(UNKNOWN)
            kind = _MODEL_TYPES[trainer.get(3, 1)]
            ids = {"unk": unknown, "bos": trainer.get(41, 1), "eos": trainer.get(42, 2), "pad": trainer.get(43, -1)}
            special = {key: index for key, index in ids.items() if _is_special(pieces, index)}
            model = cls(
                pieces,
                kind,
                special,
                normalizer=normalizer.get(1, b"").decode("utf-8"),
                charsmap=normalizer.get(2, b""),
                dummy_prefix=bool(normalizer.get(3, 1)),
                removes_spaces=bool(normalizer.get(4, 1)),
                byte_fallback=bool(trainer.get(35, 0)) and types.count(BYTE) == 256,
            )
        except (ValueError, IndexError, KeyError, TypeError, AttributeError, struct.error):
            raise BadData(f"{name} is not a SentencePiece model") from None
        if kind in ("word", "char"):
            raise BadData(f"{name} is a {kind} model; only unigram and bpe models are supported")
        if trainer.get(24, 0):
            raise BadData(f"{name} was trained with treat_whitespace_as_suffix, which is not supported")
        if not normalizer.get(5, 1):
            raise BadData(f"{name} was trained without escape_whitespaces, which is not supported")
        return model

    def tokenizer(
        self, template: Template = "none", name: str = "tokenizer.json", added: Sequence[str] | None = None
    ) -> Tokenizer:
        """The model as a tokenizer.json whose special tokens around a text follow ``template``.

        ``added``: special tokens to append after the pieces, instead of the standard ones that the file lacks. With
        it, special tokens are also recognised where a text spells them.
        """
        from tokenizers import AddedToken

        backend = self._bpe() if self.model_type == "bpe" else self._unigram()
        backend.normalizer, backend.decoder = self._normalizer(), self._decoder()
        ids = dict(self.special_ids)
        is_literal = added is None
        if added is None:
            missing = [key for key in _MISSING_NAMES if key not in ids]
            names = {piece for piece, _, _ in self.pieces}
            added = [_unused_name(_MISSING_NAMES[key], names) for key in missing]
            ids |= {key: len(self.pieces) + n for n, key in enumerate(missing)}
        control = [piece for piece, _, kind in self.pieces if kind in (UNKNOWN, CONTROL)]
        backend.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in [*control, *added]])
        bos, eos = ((backend.id_to_token(ids.get(key, 0)) or "", ids.get(key, 0)) for key in ("bos", "eos"))
        set_template(backend, template, bos, eos)
        tokenizer = Tokenizer(backend.to_str(pretty=False).encode("utf-8"), name).with_special_ids(**ids)
        return tokenizer.with_literal_special_tokens() if is_literal else tokenizer

    def _unigram(self) -> Backend:
        """The most probable segmentation (Viterbi). Where a text spells a piece that represents no text, such as
        <s>, it is split after the first character, so that it is not encoded as that piece."""
        from tokenizers import Regex, models, pre_tokenizers
        from tokenizers import Tokenizer as Backend

        highest = max((score for _, score, kind in self.pieces if kind == NORMAL), default=0.0)
        vocab = [  # user-defined symbols get SentencePiece's bonus
            (piece, len(piece.encode("utf-8")) * highest - 0.1 if kind == USER_DEFINED else score)
            for piece, score, kind in self.pieces
        ]
        names = {piece for piece, _, kind in self.pieces if kind in (UNKNOWN, CONTROL, UNUSED) and len(piece) > 1}
        patterns = [f"{_escape(name[0])}(?={_escape(name[1:])})" for name in sorted(names)]
        patterns += ["<(?=0x[0-9A-F]{2}>)"] * self.byte_fallback
        backend = Backend(models.Unigram(vocab, unk_id=self.special_ids["unk"], byte_fallback=self.byte_fallback))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(patterns)), "merged_with_previous")
        return backend

    def _bpe(self) -> Backend:
        """Merge neighbours whose concatenation is a piece, the highest score first."""
        from tokenizers import Regex, models, pre_tokenizers
        from tokenizers import Tokenizer as Backend

        normal = {piece: score for piece, score, kind in self.pieces if kind == NORMAL}
        pairs = [
            (-score, cut, piece)
            for piece, score in normal.items()
            for cut in range(1, len(piece))
            if piece[:cut] in normal and piece[cut:] in normal
        ]
        symbols = [piece for piece, _, kind in self.pieces if kind == USER_DEFINED]
        model: Callable[..., Any] = models.BPE
        backend = Backend(
            model(
                {piece: index for index, (piece, _, _) in enumerate(self.pieces)},
                [(piece[:cut], piece[cut:]) for _, cut, piece in sorted(pairs)],
                unk_token=self.pieces[self.special_ids["unk"]][0],
                fuse_unk=True,
                byte_fallback=self.byte_fallback,
                ignore_merges=bool(symbols),  # a word that is a symbol is looked up, not merged from characters
            )
        )
        if symbols:
            longest_first = sorted(map(_escape, symbols), key=len, reverse=True)
            backend.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(longest_first)), "isolated")
        return backend

    def _normalizer(self) -> Any:
        from tokenizers import Regex, normalizers

        steps: list[Any] = []
        if self.charsmap:
            # Precompiled replaces single characters, so letters and combining marks must be composed before it.
            steps += [normalizers.NFC()] if self.normalizer in _COMPOSING else []
            steps.append(normalizers.Precompiled(self.charsmap))
        if self.removes_spaces:
            outer, repeated = Regex(f"^ +|[ {SPACE}]+$"), Regex(" {2,}")
            steps += [normalizers.Replace(outer, ""), normalizers.Replace(repeated, " ")]
        steps += [normalizers.Prepend(SPACE)] if self.dummy_prefix else []
        return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])

    def _decoder(self) -> Any:
        from tokenizers import decoders

        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        return decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if self.dummy_prefix else [])])


def load_tokenizer(path: str | Path, template: Template = "none") -> Tokenizer:
    """Load a tokenizer.json trained by regard, or a SentencePiece model with special tokens by ``template``."""
    path = Path(path)
    if path.suffix == ".json":
        return Tokenizer.load(path)
    if path.suffix not in TOKENIZER_FILES:
        kinds = ", ".join(TOKENIZER_KINDS)
        raise ValueError(
            f"data.tokenizer={str(path)!r} is not one of {kinds}, nor a tokenizer.json or a SentencePiece .model"
        )
    return SentencePieceModel.parse(read_input(path), str(path)).tokenizer(template, str(path))


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a protocol buffer; a value is an int (varint) or bytes (everything else)."""
    offset = 0

    def varint() -> int:
        nonlocal offset
        value = shift = 0
        while True:
            byte = message[offset]
            offset += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value - (1 << 64) if value >= 1 << 63 else value

    while offset < len(message):
        number, wire_type = divmod(varint(), 8)
        if wire_type == 0:
            yield number, varint()
            continue
        size = {1: 8, 5: 4}[wire_type] if wire_type != 2 else varint()
        if size < 0 or offset + size > len(message):
            raise ValueError("a field extends beyond its message")
        yield number, message[offset : offset + size]
        offset += size


def _piece(message: bytes) -> tuple[str, float, int]:
    fields = dict(_fields(message))
    (score,) = struct.unpack("<f", fields.get(2, bytes(4)))
    return fields[1].decode("utf-8"), score, fields.get(3, NORMAL)


def _is_special(pieces: list[tuple[str, float, int]], index: int) -> bool:
    return 0 <= index < len(pieces) and pieces[index][2] in (UNKNOWN, CONTROL)


def _unused_name(name: str, used: set[str]) -> str:
    """The name, in as many additional brackets as it takes to differ from every piece of the file."""
    while name in used:
        name = f"<{name}>"
    return name


def _escape(text: str) -> str:
    """Escape a text for Oniguruma, the regular expressions of ``tokenizers``."""
    return "".join(f"\\{x}" if x in "\\.^$*+?()[]{}|/-" else x for x in text)
