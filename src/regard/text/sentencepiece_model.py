"""SentencePiece models (Kudo & Richardson 2018) as a ``Tokenizer``, with the ids they have there.

A ``.model`` file is a protocol buffer: pieces with a score and a type, how text is normalised, which ids are special.
Unigram and BPE models become a tokenizer.json that the ``tokenizers`` library runs, so that the sentencepiece package
is not needed. In SentencePiece a space is the letter ▁, one stands before a text, and pieces may cross words: all of it
is done by normalisers, and the whole text is one word to the model. Special tokens that the file lacks come after its
own. Ids differ in one case: a combining mark after a character that the normalisation replaces is lost.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.data_config import TOKENIZER_FILES
from ..errors import BadData
from .tokenizer import SPACE, Tokenizer
from .tokenizer_training import TOKENIZER_KINDS, Template, set_template

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of a piece
_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
_MISSING_NAMES = {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "mask": "<mask>"}
_COMPOSING = ("nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf")  # normalisations that also compose


@dataclass(frozen=True)
class SentencePieceModel:
    """What a ``.model`` file says."""

    pieces: list[tuple[str, float, int]]  # text, score, type
    model_type: str
    special_ids: dict[str, int]  # pad, bos, eos and unk, those there are
    normalizer: str = "identity"
    charsmap: bytes = b""  # how characters are replaced, compiled
    dummy_prefix: bool = True
    removes_spaces: bool = True  # at both ends, and all but one between words
    byte_fallback: bool = False

    @classmethod
    def parse(cls, content: bytes, name: str) -> SentencePieceModel:
        """The fields of the file that encoding depends on; BadData where it is no such file."""
        try:
            fields = list(_fields(content))
            pieces = [_piece(value) for number, value in fields if number == 1]
            trainer, normalizer = (dict(_fields(b"".join(v for n, v in fields if n == number))) for number in (2, 3))
            types = [kind for _, _, kind in pieces]
            unknown = types.index(UNKNOWN)
            kind = _MODEL_TYPES[trainer.get(3, 1)]
            given = {"unk": unknown, "bos": trainer.get(41, 1), "eos": trainer.get(42, 2), "pad": trainer.get(43, -1)}
            special = {key: index for key, index in given.items() if _is_special(pieces, index)}
            return cls(
                pieces,
                kind,
                special,
                normalizer=normalizer.get(1, b"").decode("utf-8"),
                charsmap=normalizer.get(2, b""),
                dummy_prefix=bool(normalizer.get(3, 1)),
                removes_spaces=bool(normalizer.get(4, 1)),
                byte_fallback=bool(trainer.get(35, 0)) and types.count(BYTE) == 256,
            ).check_supported(name, trainer, normalizer)
        except (ValueError, IndexError, KeyError, TypeError, AttributeError, struct.error):
            raise BadData(f"{name} is not a SentencePiece model") from None

    def check_supported(self, name: str, trainer: dict[int, Any], normalizer: dict[int, Any]) -> SentencePieceModel:
        unsupported = {
            f"a {self.model_type} model; unigram and bpe can": self.model_type in ("word", "char"),
            "with treat_whitespace_as_suffix, which cannot": bool(trainer.get(24, 0)),
            "without escape_whitespaces, which cannot": not normalizer.get(5, 1),
        }
        if problems := [what for what, is_so in unsupported.items() if is_so]:
            raise BadData(f"{name} is {problems[0]} be read")
        return self

    def tokenizer(
        self, template: Template = "none", name: str = "tokenizer.json", added: Sequence[str] | None = None
    ) -> Tokenizer:
        """The same as a tokenizer.json, with special tokens around a text as ``template`` says.

        ``added`` are special tokens of a model's own after the pieces, in place of those that the file lacks; they,
        and those of the file, are then tokens where a text spells them.
        """
        from tokenizers import AddedToken

        backend = self._bpe() if self.model_type == "bpe" else self._unigram()
        backend.normalizer, backend.decoder = self._normalizer(), self._decoder()
        ids, size = dict(self.special_ids), len(self.pieces)
        is_own, names = added is not None, {piece for piece, _, _ in self.pieces}
        if added is None:
            missing = [key for key in _MISSING_NAMES if key not in ids]
            added = [_free_name(_MISSING_NAMES[key], names) for key in missing]
            ids |= {key: size + n for n, key in enumerate(missing)}
        control = [piece for piece, _, kind in self.pieces if kind in (UNKNOWN, CONTROL)]
        backend.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in [*control, *added]])
        bos, eos = ((backend.id_to_token(ids.get(key, 0)) or "", ids.get(key, 0)) for key in ("bos", "eos"))
        set_template(backend, template, bos, eos)
        tokenizer = Tokenizer(backend.to_str(pretty=False).encode("utf-8"), name).with_special_ids(**ids)
        return tokenizer if is_own else tokenizer.with_literal_special_tokens()

    def _unigram(self) -> Backend:
        """The likeliest cut into pieces (Viterbi). A text that spells a piece which stands for no text is split."""
        from tokenizers import Regex, models, pre_tokenizers
        from tokenizers import Tokenizer as Backend

        highest = max((score for _, score, kind in self.pieces if kind == NORMAL), default=0.0)
        vocab = [  # user-defined symbols are preferred as SentencePiece does
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
        """Two neighbours merge where together they are a piece, those of the highest score first."""
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
                ignore_merges=bool(symbols),  # of a word that is a symbol
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
            # The library replaces single characters; here letters and their marks are composed first.
            steps += [normalizers.NFC()] if self.normalizer in _COMPOSING else []
            steps.append(normalizers.Precompiled(self.charsmap))
        if self.removes_spaces:
            trailing, several = Regex(f"^ +|[ {SPACE}]+$"), Regex(" {2,}")
            steps += [normalizers.Replace(trailing, ""), normalizers.Replace(several, " ")]
        steps += [normalizers.Prepend(SPACE)] if self.dummy_prefix else []
        return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])

    def _decoder(self) -> Any:
        from tokenizers import decoders

        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        return decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if self.dummy_prefix else [])])


def load_tokenizer(path: str | Path, template: Template = "none") -> Tokenizer:
    """A tokenizer.json that was learned here, or a SentencePiece model; ``template`` is for the latter."""
    path = Path(path)
    if path.suffix == ".json":
        return Tokenizer.load(path)
    if path.suffix not in TOKENIZER_FILES:
        files = "nor a tokenizer.json or a SentencePiece .model"
        raise ValueError(f"data.tokenizer={str(path)!r} is none of {', '.join(TOKENIZER_KINDS)}, {files}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadData(f"{path} cannot be read: {error.strerror}") from None
    return SentencePieceModel.parse(content, str(path)).tokenizer(template, str(path))


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer, (number, value): a whole number, or the bytes of anything else."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value - (1 << 64) if value >= 1 << 63 else value

    while place < len(message):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            yield number, varint()
            continue
        size = {1: 8, 5: 4}[wire] if wire != 2 else varint()
        if size < 0 or place + size > len(message):
            raise ValueError("a field ends after its message")
        yield number, message[place : place + size]
        place += size


def _piece(message: bytes) -> tuple[str, float, int]:
    fields = dict(_fields(message))
    (score,) = struct.unpack("<f", fields.get(2, bytes(4)))
    return fields[1].decode("utf-8"), score, fields.get(3, NORMAL)


def _is_special(pieces: list[tuple[str, float, int]], index: int) -> bool:
    return 0 <= index < len(pieces) and pieces[index][2] in (UNKNOWN, CONTROL)


def _free_name(name: str, taken: set[str]) -> str:
    """The name, with more brackets where the file has such a piece."""
    while name in taken:
        name = f"<{name}>"
    return name


def _escape(text: str) -> str:
    """For Oniguruma, which is what the library searches with."""
    return "".join(f"\\{x}" if x in "\\.^$*+?()[]{}|/-" else x for x in text)
