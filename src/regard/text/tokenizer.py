"""Text to token ids and back.

``Tokenizer`` reads any tokenizer.json, trained by regard or by Hugging Face. regard trains five kinds:

- ``bytes`` and ``bpe`` (byte-level; Sennrich et al. 2016, Radford et al. 2019) are lossless: decoding restores the
  text exactly. In a run whose data is composed (``data.normalise``), they compose a text first, like the others.
- ``chars``, ``words`` and ``unigram`` (Kudo 2018) restore the text in NFC, with <unk> for anything absent from the
  training texts. In the last two, ▁ stands for the space before a word; one is prepended to the text and stripped
  again on decoding.

``MarianTokenizer`` is the only foreign kind without a tokenizer.json; other SentencePiece models are converted to one
(``sentencepiece_model``). A byte-level token may hold only part of a character, so ``token_spans`` groups the tokens
that together form whole characters.
"""

from __future__ import annotations

import codecs
import copy
import hashlib
import importlib.util
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadData, BadModelFile, first_line
from ..foundation.files import read_input, write_atomic
from ..foundation.jsonio import to_json
from ..foundation.plugins import import_optional

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<mask>")
PAD, BOS, EOS, UNK, MASK = range(5)  # ids in every native tokenizer; the first three are ModelConfig's defaults
SPACE = "▁"
_BATCH_SIZE = 4096  # maximum number of texts per call of the library
_BATCH_CHARACTERS = 1 << 20  # a batch is closed once it holds more characters than this
_PIECE_CHARACTERS = 1 << 16  # minimum length of all but the last piece of a long text
_BETWEEN_WORDS = re.compile(r"(?<=\S)[ \n](?=\S)")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_PLACEHOLDER = re.compile(r"unk|mask", re.IGNORECASE)

# The character that byte-level models write for each byte (Radford et al. 2019); printable bytes map to themselves.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF_LETTER = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, by U+FFFD."""
    return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def cut_text(text: str) -> Iterator[str]:
    """Cut a long text into pieces; each but the first begins with the single space or newline between two words.

    No token crosses such a boundary, so the pieces yield the same tokens as the whole text. Encoding a gigabyte of
    text in one call would take a hundred times as much memory.
    """
    start = 0
    while (match := _BETWEEN_WORDS.search(text, start + _PIECE_CHARACTERS)) is not None:
        yield text[start : match.start()]
        start = match.start()
    yield text[start:]


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Consecutive tokens ``first`` to ``last`` (exclusive) that together form whole characters."""

    text: str
    first: int
    last: int
    start: int  # characters start:end of the decoded text; empty for special and unknown tokens
    end: int
    special: bool = False  # True for the tokens that mark the beginning, the end or padding


def _special_id(name: str) -> property:
    """A property that looks up ``special_ids[name]``."""

    def read(tokenizer: Tokenizer) -> int:
        if name not in tokenizer.special_ids:
            raise ValueError(f"{tokenizer.name} has no {name} token, or does not say which token it is")
        return tokenizer.special_ids[name]

    return property(read)


class Tokenizer:
    """A tokenizer.json, run by the ``tokenizers`` library. ``content`` is the file, byte for byte.

    ``special_ids`` maps "pad", "bos", "eos", "unk" and "mask" to ids. A tokenizer trained by regard (``is_native``) has
    all five at ids 0 to 4. A foreign file does not say which ids they are: its ``special_ids`` are empty until
    ``with_special_ids`` sets those of its model, as ``read_processor`` does.
    """

    special_ids: Mapping[str, int]
    is_native: bool
    has_literal_special_tokens = False  # whether "</s>" in a text is encoded as four characters, as native files do
    pad_id, bos_id, eos_id, unk_id, mask_id = map(_special_id, ("pad", "bos", "eos", "unk", "mask"))

    def __init__(self, content: bytes, name: str = "tokenizer.json") -> None:
        from tokenizers import Tokenizer as Backend

        self.content, self.name = content, name
        with library_errors_as_bad_file(name):
            self._backend: Backend = Backend.from_str(content.decode("utf-8"))
            # Length limits and padding are the caller's choice, not the file's.
            self._backend.no_truncation()
            self._backend.no_padding()
        self.is_native = self._first_tokens() == SPECIAL
        self.special_ids = {}
        if self.is_native:
            self.special_ids = {"pad": PAD, "bos": BOS, "eos": EOS, "unk": UNK, "mask": MASK}
            self._backend.encode_special_tokens = True  # encode "<eos>" in a user's text as five characters

    @classmethod
    def read_native(cls, content: bytes, name: str) -> Tokenizer:
        """Read a tokenizer trained by regard; raise BadData for any other file."""
        try:
            tokenizer = cls(content, name)
        except BadModelFile as error:
            raise BadData(str(error)) from None
        if not tokenizer.is_native:
            raise BadData(f"{name} starts with the tokens {tokenizer._first_tokens()}, but {SPECIAL} are needed")
        return tokenizer

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        return cls.read_native(read_input(path), str(path))

    def save(self, path: str | Path) -> None:
        write_atomic(Path(path), self.content)

    def with_special_ids(self, **ids: int) -> Tokenizer:
        """A copy with these special ids set: ``with_special_ids(pad=0, eos=2)``."""
        other = copy.copy(self)
        other.special_ids = {**self.special_ids, **ids}
        return other

    def with_literal_special_tokens(self) -> Tokenizer:
        """A copy that encodes the names of special tokens in a text as ordinary characters."""
        other = Tokenizer(self.content, self.name).with_special_ids(**self.special_ids)
        other._backend.encode_special_tokens = other.has_literal_special_tokens = True
        return other

    @property
    def size(self) -> int:
        """Number of entries in the vocabulary."""
        return self._backend.get_vocab_size()

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text; ``special`` adds the special tokens of the file's template."""
        with library_errors_as_bad_file(self.name):
            return list(self._backend.encode(replace_surrogates(text), add_special_tokens=special).ids)

    def encode_all(self, texts: Iterable[str], *, special: bool = True) -> list[list[int]]:
        """The ids of many texts, on all cores."""
        return list(self.encode_stream(texts, special=special))

    def encode_stream(self, texts: Iterable[str], *, special: bool = True) -> Iterator[list[int]]:
        """Like ``encode_all``, holding a few thousand texts at a time."""
        whole: list[int] = []
        for ids, is_last in self.encode_parts(((text, True) for text in texts), special=special):
            whole += ids
            if is_last:
                yield whole
                whole = []

    def encode_parts(
        self, parts: Iterable[tuple[str, bool]], *, special: bool = False
    ) -> Iterator[tuple[list[int], bool]]:
        """Encode texts that arrive in parts: (part, whether it ends its text) in, (ids, whether they end it) out.

        A long text is encoded in pieces (``cut_text``) if that yields the same ids and no special tokens are added.
        """
        n_added = None if special else self._n_added_to_piece
        pieces = cut_parts(parts, whole=n_added is None)
        while batch := _next_batch(pieces):
            encoded = self._encode_batch([replace_surrogates(text) for text, _, _ in batch], special)
            for ids, (_, is_first, is_last) in zip(encoded, batch, strict=True):
                yield (ids if is_first else ids[n_added:]), is_last

    def _encode_batch(self, texts: list[str], special: bool) -> Iterable[list[int]]:
        with library_errors_as_bad_file(self.name):
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=special)
        return (encoding.ids for encoding in encodings)

    @cached_property
    def _n_added_to_piece(self) -> int | None:
        """Number of tokens to drop from the start of every piece but the first, because some kinds prepend a ▁.

        None if encoding in pieces changes the ids; such a tokenizer encodes every text whole.
        """

        def ids(text: str) -> list[int]:
            return self.encode(text, special=False)

        words = ("ab", "x1.", "가나", '("', "é")
        texts = [(left, f"{space}{right} {left}") for left in words for right in words for space in " \n"]
        for n in (0, 1):
            if all(ids(left + right) == ids(left) + ids(right)[n:] for left, right in texts):
                return n
        return None

    def encode_pairs(self, pairs: Iterable[tuple[str, str]]) -> Iterator[list[int]]:
        """The ids of each pair as one row in the file's pair template: <bos> a <eos> b <eos>, [CLS] a [SEP] b [SEP]."""
        cleaned = ((replace_surrogates(first), replace_surrogates(second)) for first, second in pairs)
        while batch := list(islice(cleaned, _BATCH_SIZE)):
            with library_errors_as_bad_file(self.name):
                encodings = self._backend.encode_batch_fast(batch)
            yield from (encoding.ids for encoding in encodings)

    def encode_words(self, words: Sequence[str]) -> tuple[list[int], list[int]]:
        """The ids of the words joined by spaces, and the position of each word's first token (-1 if it has none)."""
        text = replace_surrogates(" ".join(words))
        ends = list(accumulate(len(word) + 1 for word in words))
        with library_errors_as_bad_file(self.name):
            encoding = self._backend.encode(text)
        first = [-1] * len(words)
        for position, (start, end) in enumerate(encoding.offsets):
            # A token may begin with the space before its word, so its last character decides the word.
            word = bisect_right(ends, end - 1)
            if start < end and word < len(words) and end < ends[word] and first[word] < 0:
                first[word] = position
        return list(encoding.ids), first

    def unknown_texts(self, text: str) -> list[str]:
        """The parts of a text, as typed, that are encoded as the unknown token."""
        unknown, cleaned = self.special_ids.get("unk"), replace_surrogates(text)
        with library_errors_as_bad_file(self.name):
            encoding = self._backend.encode(cleaned)
        offsets = zip(encoding.ids, encoding.offsets, strict=True)
        return [cleaned[start:end].strip() for index, (start, end) in offsets if index == unknown]

    @property
    def separator_id(self) -> int | None:
        """The token between two texts and after the second; None if the template adds no token at the end."""
        return next(iter(self.encode("")[::-1]), None)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids, without special tokens."""
        with library_errors_as_bad_file(self.name):
            return self._backend.decode([int(index) for index in ids])

    def token(self, index: int | None) -> str | None:
        """The vocabulary entry with this id, or None."""
        return None if index is None or index < 0 else self._backend.id_to_token(index)

    def token_id(self, token: str) -> int | None:
        """The id of a vocabulary entry, or None."""
        return self._backend.token_to_id(token)

    @cached_property
    def merge_ranks(self) -> dict[tuple[str, str], int]:
        """The rank of each merge of a native byte-level BPE, lowest first; empty for any other kind."""
        model = json.loads(self.content)["model"] if self.is_native else {}
        merges = model.get("merges") or () if model.get("type") == "BPE" else ()
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in merges)
        return {(first, second): rank for rank, (first, second) in enumerate(pairs)}

    def split_words(self, text: str) -> list[str]:
        """The words of a text in byte-level spelling; BPE merges never cross from one to the next."""
        pre_tokenizer: Any = self._backend.pre_tokenizer
        return [word for word, _ in pre_tokenizer.pre_tokenize_str(replace_surrogates(text))]

    @cached_property
    def token_ids(self) -> dict[str, int]:
        """The id of every vocabulary entry."""
        return dict(self._backend.get_vocab())

    @cached_property
    def all_special_ids(self) -> frozenset[int]:
        """The ids of all tokens that represent no text: ``special_ids`` and all others the file marks as special."""
        ids = {self.token_id(token) for token in self._special_tokens} | set(self.special_ids.values())
        return frozenset(index for index in ids if index is not None)

    def _first_tokens(self) -> tuple[str | None, ...]:
        return tuple(self._backend.id_to_token(index) for index in range(len(SPECIAL)))

    def span_texts(self, ids: Sequence[int]) -> list[str]:
        return [span.text for span in self.token_spans(ids)]

    def token_spans(self, ids: Sequence[int]) -> list[TokenSpan]:
        """The readable text of each token, in order; tokens that hold parts of one character share a span.

        For a native tokenizer, the texts of all spans with start < end concatenate to ``decode(ids)``.
        """
        spans: list[TokenSpan] = []
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        first, start, text, at_start = 0, 0, "", True

        def close_span(last: int) -> None:
            nonlocal first, start, text
            if first < last:
                spans.append(TokenSpan(text, first, last, start, start + len(text)))
                start += len(text)
            first, text = last, ""

        for position, index in enumerate(map(int, ids)):
            token = self.token(index)
            if token is None or token in self._special_tokens:
                text += decoder.decode(b"", final=True)
                decoder.reset()
                close_span(position)
                if token is None or self.is_native:
                    name, special = token or f"<{index}>", token is not None and index in (PAD, BOS, EOS)
                else:  # a placeholder for a word (<unk>, [MASK]) is displayed like a word, after a space
                    special = not _WORD_PLACEHOLDER.search(token)
                    name = token if special else f" {token}"
                spans.append(TokenSpan(name, position, position + 1, start, start, special))
                first = position + 1
                at_start = at_start and (special or self.is_native)
                continue
            text += decoder.decode(self._spell(token, at_start))
            at_start = False
            if not decoder.getstate()[0]:  # no bytes of an incomplete character are pending
                close_span(position + 1)
        text += decoder.decode(b"", final=True)
        close_span(len(ids))
        return spans

    def token_bytes(self, index: int) -> bytes | None:
        """The bytes a token appends to a non-empty text; None for special and unknown ids."""
        token = self.token(index)
        return None if token is None or index in self.all_special_ids else self._spell(token, False)

    @cached_property
    def _special_tokens(self) -> set[str]:
        if self.is_native:
            return set(SPECIAL)
        added = json.loads(self.content).get("added_tokens") or ()
        return {token["content"] for token in added if token.get("special")}

    @cached_property
    def _spell(self) -> Callable[[str, bool], bytes]:
        """The function (token, whether it begins the text) → the bytes it adds, chosen by the file's decoder."""
        decoders = set(re.findall(r'"type": "(\w+)"', json.dumps(json.loads(self.content).get("decoder"))))
        if "ByteLevel" in decoders:
            return _spell_byte_level
        if "WordPiece" in decoders or not decoders:  # without a decoder, the library joins tokens with spaces
            return _spell_word_piece
        if decoders & {"BPEDecoder", "Metaspace", "Replace", "ByteFallback"}:
            return _spell_spaced
        return lambda token, at_start: token.encode()


_MARIAN_SPECIAL = re.compile("(<unk>|</s>|<pad>)")


class MarianTokenizer(Tokenizer):
    """One side of a Marian model: SentencePiece splits a text into pieces, vocab.json maps them to ids, </s> ends it.

    ``>>de<<`` at the start of a text, the target language, is one token.
    """

    is_native = False

    def __init__(self, model: bytes, vocab: Mapping[str, int], name: str) -> None:
        self.model, self.vocab, self.name, self.special_ids = model, vocab, name, {}
        self.content = model + to_json(dict(vocab))
        self._tokens = {index: token for token, index in vocab.items()}
        self._special_tokens = {"<unk>", "</s>", "<pad>"}
        self._spell = _spell_spaced
        if missing := [token for token in ("<unk>", "</s>") if token not in vocab]:
            raise BadModelFile(f"vocab.json for {name} has no token {missing[0]!r}")
        self._unknown, self._end = vocab["<unk>"], vocab["</s>"]
        if importlib.util.find_spec("sentencepiece") is not None:
            self._pieces  # noqa: B018 — reject a damaged file here, not at the first text

    @cached_property
    def _pieces(self) -> Any:
        pieces = import_optional("sentencepiece", self.name, "hub").SentencePieceProcessor()
        try:
            pieces.LoadFromSerializedProto(self.model)
            return pieces
        except (RuntimeError, ValueError, TypeError) as error:
            raise BadModelFile(f"{self.name} is not a SentencePiece model: {error}") from None

    @property
    def size(self) -> int:
        return len(self.vocab)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [self.vocab.get(piece, self._unknown) for piece in self._cut(text)] + [self._end] * special

    def _cut(self, text: str) -> list[str]:
        """The pieces of a text. Special tokens spelled in it are one piece each; the rest is cut around them."""
        pieces: list[str] = []
        for part in _MARIAN_SPECIAL.split(text):
            if part in self._special_tokens:
                pieces.append(part)
                continue
            if (language := re.match(r"(?s)>>.*?<<", part)) is not None:
                pieces.append(language[0])
                part = part[language.end() :]
            pieces += self._pieces.encode(part, out_type=str)
        return pieces

    def _encode_batch(self, texts: list[str], special: bool) -> Iterable[list[int]]:
        return (self.encode(text, special=special) for text in texts)

    def unknown_texts(self, text: str) -> list[str]:
        return [piece.replace(SPACE, " ").strip() for piece in self._cut(text) if piece not in self.vocab]

    def decode(self, ids: Iterable[int]) -> str:
        pieces = [self._tokens.get(int(index), "<unk>") for index in ids]
        plain = [piece for piece in pieces if piece not in self._special_tokens]
        return self._pieces.decode_pieces(plain).replace(SPACE, " ").strip()

    def token(self, index: int | None) -> str | None:
        return None if index is None else self._tokens.get(index)

    def token_id(self, token: str) -> int | None:
        return self.vocab.get(token)


def cut_parts(parts: Iterable[tuple[str, bool]], whole: bool = False) -> Iterator[tuple[str, bool, bool]]:
    """Reassemble texts from (part, whether it ends its text) and cut them with ``cut_text`` unless ``whole``.

    Yields (piece, whether it is the first of its text, whether it is the last).
    """
    rest, is_first = "", True
    for part, ends in parts:
        rest += part
        if len(rest) > _PIECE_CHARACTERS and not whole:
            *pieces, rest = cut_text(rest)
            for piece in pieces:
                yield piece, is_first, False
                is_first = False
        if ends:
            yield rest, is_first, True
            rest, is_first = "", True


def _next_batch(pieces: Iterator[tuple[str, bool, bool]]) -> list[tuple[str, bool, bool]]:
    batch, n_characters = [], 0
    for piece in islice(pieces, _BATCH_SIZE):
        batch.append(piece)
        n_characters += len(piece[0])
        if n_characters > _BATCH_CHARACTERS:
            break
    return batch


def _spell_byte_level(token: str, at_start: bool) -> bytes:
    return bytes(BYTE_OF_LETTER[x] for x in token) if all(x in BYTE_OF_LETTER for x in token) else token.encode()


def _spell_word_piece(token: str, at_start: bool) -> bytes:
    if token.startswith("##") and len(token) > 2:
        return token[2:].encode()
    return (token if at_start else f" {token}").encode()


def _spell_spaced(token: str, at_start: bool) -> bytes:
    if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
        return bytes([int(byte[1], 16)])
    text = token.replace(SPACE, " ").replace("</w>", " ")
    return (text.removeprefix(" ") if at_start else text).encode()


@contextmanager
def library_errors_as_bad_file(name: str) -> Iterator[None]:
    """Turn errors of ``tokenizers`` into BadModelFile. On a malformed file it raises a bare Exception, or panics in
    Rust, which is a BaseException."""
    try:
        yield
    except (BadModelFile, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        reason = first_line(error)
        raise BadModelFile(f"{name} is not a tokenizer that can be read: {reason}") from None
