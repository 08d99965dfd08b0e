"""Text to token ids and back.

``Tokenizer`` reads any tokenizer.json, learned here or written by Hugging Face. The kinds learned here:

- ``bytes`` and ``bpe`` (byte-level; Sennrich et al. 2016, Radford et al. 2019) give any text back exactly.
- ``chars``, ``words`` and ``unigram`` (Kudo 2018) give it back in NFC, with <unk> for what was not in the training
  texts. In the last two, ▁ stands for the space before a word; one is added before the text and removed on decoding.

``MarianTokenizer`` is the one foreign kind without a tokenizer.json; other SentencePiece models become one
(``sentencepiece_model``). A byte-level token may hold a part of a character:
``token_spans`` groups the tokens that together make whole characters.
"""

from __future__ import annotations

import codecs
import copy
import hashlib
import importlib
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

from ..errors import BadData, BadModelFile, RegardError
from ..foundation.files import write_atomic
from ..foundation.jsonio import to_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<mask>")
PAD, BOS, EOS, UNK, MASK = range(5)  # ids in every tokenizer learned here; the first three are ModelConfig's defaults
SPACE = "▁"
_BATCH_SIZE, _BATCH_CHARACTERS = 4096, 1 << 20  # at most so many texts, and then about so many characters, at a time
_PIECE_CHARACTERS = 1 << 16
_BETWEEN_WORDS = re.compile(r"(?<=\S)[ \n](?=\S)")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_STANDS_FOR_A_WORD = re.compile(r"unk|mask", re.IGNORECASE)


# The letter byte-level models write for each byte (Radford et al. 2019): printable bytes are themselves.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF_LETTER = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which have no UTF-8 form, by U+FFFD."""
    return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def cut_text(text: str) -> Iterator[str]:
    """A long text in pieces: each but the first begins with the single space or line end between two words.

    No token crosses such a place, so the pieces have the tokens of the whole text; one text of a gigabyte would take
    a hundred times as much memory.
    """
    start = 0
    while (match := _BETWEEN_WORDS.search(text, start + _PIECE_CHARACTERS)) is not None:
        yield text[start : match.start()]
        start = match.start()
    yield text[start:]


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Consecutive tokens ``first`` to ``last`` (exclusive) that make whole characters together."""

    text: str
    first: int
    last: int
    start: int  # characters start:end of the decoded text; empty for special and unknown tokens
    end: int
    special: bool = False  # marks where a text begins, ends or is padded


def _special_id(name: str) -> property:
    """The property ``pad_id`` of a tokenizer is its ``special_ids["pad"]``, and so on."""

    def read(tokenizer: Tokenizer) -> int:
        if name not in tokenizer.special_ids:
            raise ValueError(f"{tokenizer.name} has no {name} token, or does not say which it is")
        return tokenizer.special_ids[name]

    return property(read)


class Tokenizer:
    """A tokenizer.json, run by the ``tokenizers`` library. ``content`` is the file, byte for byte.

    ``special_ids`` maps "pad", "bos", "eos", "unk" and "mask" to ids. Files learned here (``is_native``) have all five
    at 0 to 4; a foreign file does not say, so it has none until ``with_special_ids`` gives it those of its model, as
    ``read_processor`` does.
    """

    special_ids: Mapping[str, int]
    is_native: bool
    has_literal_special_tokens = False  # "</s>" typed by someone is four characters, as in a file learned here
    pad_id, bos_id, eos_id, unk_id, mask_id = map(_special_id, ("pad", "bos", "eos", "unk", "mask"))

    def __init__(self, content: bytes, name: str = "tokenizer.json") -> None:
        from tokenizers import Tokenizer as Backend

        self.content, self.name = content, name
        with _library_errors_as_bad_file(name):
            self._backend: Backend = Backend.from_str(content.decode("utf-8"))
            # Length limits and padding are the caller's choice, not the file's.
            self._backend.no_truncation()
            self._backend.no_padding()
        self.is_native, self.special_ids = self._first_tokens() == SPECIAL, {}
        if self.is_native:
            self.special_ids = {"pad": PAD, "bos": BOS, "eos": EOS, "unk": UNK, "mask": MASK}
            self._backend.encode_special_tokens = True  # "<eos>" typed by someone is five characters, not the end

    @classmethod
    def read_native(cls, content: bytes, name: str) -> Tokenizer:
        """A tokenizer learned here; BadData for any other file."""
        try:
            tokenizer = cls(content, name)
        except BadModelFile as error:
            raise BadData(str(error)) from None
        if not tokenizer.is_native:
            raise BadData(f"{name} starts with the tokens {tokenizer._first_tokens()}, but {SPECIAL} are needed")
        return tokenizer

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        try:
            return cls.read_native(Path(path).read_bytes(), str(path))
        except OSError as error:
            raise BadData(f"{path} cannot be read: {error.strerror}") from None

    def save(self, path: str | Path) -> None:
        write_atomic(Path(path), self.content)

    def with_special_ids(self, **ids: int) -> Tokenizer:
        """The same tokenizer with these special ids: ``with_special_ids(pad=0, eos=2)``."""
        other = copy.copy(self)
        other.special_ids = {**self.special_ids, **ids}
        return other

    def with_literal_special_tokens(self) -> Tokenizer:
        """The same tokenizer, to which the names of special tokens in a text are text."""
        other = Tokenizer(self.content, self.name).with_special_ids(**self.special_ids)
        other._backend.encode_special_tokens = other.has_literal_special_tokens = True
        return other

    @property
    def size(self) -> int:
        """Number of ids."""
        return self._backend.get_vocab_size()

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text; ``special`` adds the tokens the file puts around it."""
        with _library_errors_as_bad_file(self.name):
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
        """The ids of texts that come in parts, each with whether its text ends there, and so do the ids.

        A long text is encoded in pieces (``cut_text``) where that gives the same ids, and no special tokens are added.
        """
        n_added = None if special else self._n_added_to_piece
        pieces = cut_parts(parts, whole=n_added is None)
        while batch := _next_batch(pieces):
            encoded = self._encode_batch([replace_surrogates(text) for text, _, _ in batch], special)
            for ids, (_, is_first, is_last) in zip(encoded, batch, strict=True):
                yield (ids if is_first else ids[n_added:]), is_last

    def _encode_batch(self, texts: list[str], special: bool) -> Iterable[list[int]]:
        with _library_errors_as_bad_file(self.name):
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=special)
        return (encoding.ids for encoding in encodings)

    @cached_property
    def _n_added_to_piece(self) -> int | None:
        """Tokens to drop from the start of a later piece of a text: some kinds add a ▁ there.

        None where a text encoded in pieces has other ids: then it is encoded whole.
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
        """Two texts as one row: <bos> a <eos> b <eos>, or what the file has for pairs ([CLS] a [SEP] b [SEP])."""
        cleaned = ((replace_surrogates(first), replace_surrogates(second)) for first, second in pairs)
        while batch := list(islice(cleaned, _BATCH_SIZE)):
            with _library_errors_as_bad_file(self.name):
                encodings = self._backend.encode_batch_fast(batch)
            yield from (encoding.ids for encoding in encodings)

    def encode_words(self, words: Sequence[str]) -> tuple[list[int], list[int]]:
        """The ids of words with spaces between them, and where each word's first token is; -1: it has none."""
        text, ends = replace_surrogates(" ".join(words)), list(accumulate(len(word) + 1 for word in words))
        with _library_errors_as_bad_file(self.name):
            encoding = self._backend.encode(text)
        first = [-1] * len(words)
        for place, (start, end) in enumerate(encoding.offsets):
            # A token may begin with the space before its word: its last character says whose it is.
            word = bisect_right(ends, end - 1)
            if start < end and word < len(words) and end < ends[word] and first[word] < 0:
                first[word] = place
        return list(encoding.ids), first

    def unknown_texts(self, text: str) -> list[str]:
        """What of a text has no token but the unknown one, as it was typed."""
        unknown, cleaned = self.special_ids.get("unk"), replace_surrogates(text)
        with _library_errors_as_bad_file(self.name):
            encoding = self._backend.encode(cleaned)
        places = zip(encoding.ids, encoding.offsets, strict=True)
        return [cleaned[slice(*place)].strip() for index, place in places if index == unknown]

    @property
    def separator_id(self) -> int | None:
        """The token between two texts and after the second; None where the file puts none around a text."""
        return next(iter(self.encode("")[::-1]), None)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids, without special tokens."""
        with _library_errors_as_bad_file(self.name):
            return self._backend.decode([int(index) for index in ids])

    def token(self, index: int | None) -> str | None:
        """The vocabulary's entry of an id; None where there is none."""
        return None if index is None or index < 0 else self._backend.id_to_token(index)

    def token_id(self, token: str) -> int | None:
        """The id of a vocabulary's entry; None where there is no such entry."""
        return self._backend.token_to_id(token)

    @cached_property
    def merge_ranks(self) -> dict[tuple[str, str], int]:
        """The merges of byte-level BPE in the order they are made; nothing for any other kind."""
        model = json.loads(self.content)["model"] if self.is_native else {}
        merges = model.get("merges") or () if model.get("type") == "BPE" else ()
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in merges)
        return {(first, second): rank for rank, (first, second) in enumerate(pairs)}

    def split_words(self, text: str) -> list[str]:
        """The words of a text as byte-level BPE spells them: no merge crosses from one to the next."""
        words: Any = self._backend.pre_tokenizer
        return [word for word, _ in words.pre_tokenize_str(replace_surrogates(text))]

    @cached_property
    def token_ids(self) -> dict[str, int]:
        """The id of every entry of the vocabulary."""
        return dict(self._backend.get_vocab())

    @cached_property
    def all_special_ids(self) -> frozenset[int]:
        """Every token that stands for no text: the five, and whatever else the file calls special."""
        ids = {self.token_id(token) for token in self._special_tokens} | set(self.special_ids.values())
        return frozenset(index for index in ids if index is not None)

    def _first_tokens(self) -> tuple[str | None, ...]:
        return tuple(self._backend.id_to_token(index) for index in range(len(SPECIAL)))

    def span_texts(self, ids: Sequence[int]) -> list[str]:
        return [span.text for span in self.token_spans(ids)]

    def token_spans(self, ids: Sequence[int]) -> list[TokenSpan]:
        """Tokens as people read them, in order; tokens that hold parts of one character make one span.

        The texts of the spans with start < end, joined, are what ``decode`` gives for a native tokenizer.
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
                else:  # it stands for a word, or marks a position
                    special = not _STANDS_FOR_A_WORD.search(token)
                    name = token if special else f" {token}"
                spans.append(TokenSpan(name, position, position + 1, start, start, special))
                first = position + 1
                at_start = at_start and (special or self.is_native)
                continue
            text += decoder.decode(self._spell(token, at_start))
            at_start = False
            if not decoder.getstate()[0]:  # no bytes of an unfinished character are left
                close_span(position + 1)
        text += decoder.decode(b"", final=True)
        close_span(len(ids))
        return spans

    @cached_property
    def _special_tokens(self) -> set[str]:
        if self.is_native:
            return set(SPECIAL)
        added = json.loads(self.content).get("added_tokens") or ()
        return {token["content"] for token in added if token.get("special")}

    @cached_property
    def _spell(self) -> Callable[[str, bool], bytes]:
        """A function from a token, and whether it is the first, to the bytes it adds to a text."""
        decoders = set(re.findall(r'"type": "(\w+)"', json.dumps(json.loads(self.content).get("decoder"))))
        if "ByteLevel" in decoders:
            return _spell_byte_level
        if "WordPiece" in decoders or not decoders:  # without any decoder, words are joined by spaces
            return _spell_word_piece
        if decoders & {"BPEDecoder", "Metaspace", "Replace", "ByteFallback"}:
            return _spell_spaced
        return lambda token, at_start: token.encode()


class MarianTokenizer(Tokenizer):
    """One side of Marian's pair: SentencePiece cuts a text into pieces, vocab.json numbers them, </s> ends it.

    ``>>de<<`` at the start of a text, the language to translate into, is one token.
    """

    is_native = False

    def __init__(self, model: bytes, vocab: Mapping[str, int], name: str) -> None:
        self.model, self.vocab, self.name, self.special_ids = model, vocab, name, {}
        self.content = model + to_json(dict(vocab))
        self._tokens = {index: token for token, index in vocab.items()}
        self._special_tokens, self._spell = {"<unk>", "</s>", "<pad>"}, _spell_spaced
        if missing := [token for token in ("<unk>", "</s>") if token not in vocab]:
            raise BadModelFile(f"vocab.json for {name} has no token {missing[0]!r}")
        self._unknown, self._end = vocab["<unk>"], vocab["</s>"]
        if importlib.util.find_spec("sentencepiece") is not None:
            self._pieces  # noqa: B018 — refuse a damaged file now, not at the first text

    @cached_property
    def _pieces(self) -> Any:
        try:
            pieces = importlib.import_module("sentencepiece").SentencePieceProcessor()
            pieces.LoadFromSerializedProto(self.model)
            return pieces
        except ImportError:
            raise RegardError(f"{self.name} is read by sentencepiece, which is not installed") from None
        except (RuntimeError, ValueError, TypeError) as error:
            raise BadModelFile(f"{self.name} is not a SentencePiece model: {error}") from None

    @property
    def size(self) -> int:
        return len(self.vocab)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        language = re.match(r">>.+<<", text)
        pieces = [] if language is None else [language[0]]
        pieces += self._pieces.encode(text if language is None else text[language.end() :], out_type=str)
        return [self.vocab.get(piece, self._unknown) for piece in pieces] + [self._end] * special

    def _encode_batch(self, texts: list[str], special: bool) -> Iterable[list[int]]:
        return (self.encode(text, special=special) for text in texts)

    def unknown_texts(self, text: str) -> list[str]:
        pieces = self._pieces.encode(re.sub(r"^>>.+<<", "", text), out_type=str)
        return [piece.replace(SPACE, " ").strip() for piece in pieces if piece not in self.vocab]

    def decode(self, ids: Iterable[int]) -> str:
        pieces = [self._tokens.get(int(index), "<unk>") for index in ids]
        plain = [piece for piece in pieces if piece not in self._special_tokens]
        return self._pieces.decode_pieces(plain).replace(SPACE, " ").strip()

    def token(self, index: int | None) -> str | None:
        return None if index is None else self._tokens.get(index)

    def token_id(self, token: str) -> int | None:
        return self.vocab.get(token)


def cut_parts(parts: Iterable[tuple[str, bool]], whole: bool = False) -> Iterator[tuple[str, bool, bool]]:
    """Texts that come in parts cut as ``cut_text`` does, or ``whole``: a piece, and whether it is the first and the
    last one of its text."""
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
    return (token[2:] if token.startswith("##") and len(token) > 2 else token if at_start else f" {token}").encode()


def _spell_spaced(token: str, at_start: bool) -> bytes:
    if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
        return bytes([int(byte[1], 16)])
    text = token.replace(SPACE, " ").replace("</w>", " ")
    return (text.removeprefix(" ") if at_start else text).encode()


@contextmanager
def _library_errors_as_bad_file(name: str) -> Iterator[None]:
    """``tokenizers`` raises a bare Exception on a malformed file, or panics in Rust, which is no Exception at all."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BadModelFile(f"{name} is not a tokenizer that can be read: {reason}") from None
