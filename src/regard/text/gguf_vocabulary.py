"""A tokenizer.json as the ``tokenizer.*`` fields of a GGUF file, and back.

llama.cpp has code of its own for two kinds of BPE, and names for the ways to cut a text into words before it:

- ``gpt2``: byte-level BPE with its merges, as it is learned here;
- ``llama``: SentencePiece's, which merges the pair whose result has the highest score, with a token for every byte.

Every other tokenizer is refused: what is written is read back, and must give the same ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..config import ModelConfig
from ..errors import BadModelFile
from .tokenizer import EOS, SPACE, Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

Pairs = list[tuple[str, str]]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # llama.cpp's types of tokens
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How a text is cut into words before byte-level BPE, by llama.cpp's names; "gpt-2" is how the library itself does it.
_GPT2 = "gpt-2"
_WORDS = {"llama-bpe": rf"{_LETTERS}|\p{{N}}{{1,3}}|{_OTHERS}", "qwen2": rf"{_LETTERS}|\p{{N}}|{_OTHERS}"}
_TAKES_WHOLE_WORDS = "llama-bpe"  # a word that is a token is not put together from its bytes
_NO_MERGE = "ÿ þ"  # llama.cpp wants at least one merge; no UTF-8 text has these two bytes
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# Texts that tell tokenizers apart: contractions, numbers, spaces, line ends, scripts, characters of many bytes.
PROBES = (
    "Don't stop; it's 12345 km.\n\n  Two  spaces\tand a tab \r\n",
    "가나다 한국어 문장입니다. 값이 3,000원",
    "naïve ß Ω 漢字 かな 😀👩‍👩‍👧 ½",
    "x = [i**2 for i in range(10)]  # code",
    "",
)


def gguf_vocabulary(tokenizer: Tokenizer, config: ModelConfig, chat_template: str | None = None) -> dict[str, Any]:
    """The fields of a GGUF file for a tokenizer; ValueError where llama.cpp has none like it."""
    file, size = json.loads(tokenizer.content), config.vocab_size
    if file["model"]["type"] != "BPE":
        raise ValueError(_refusal(tokenizer))
    merges, has_bytes = _merges(file), bool(file["model"].get("byte_fallback"))
    added = {token["id"]: token for token in file.get("added_tokens") or ()}
    tokens = {index: token for token, index in file["model"]["vocab"].items()}
    tokens |= {index: token["content"] for index, token in added.items()}
    types = {index: _BYTE if token in _BYTES and has_bytes else _NORMAL for index, token in tokens.items()}
    types |= {index: _CONTROL if token["special"] else _USER_DEFINED for index, token in added.items()}
    ids = _special_ids(tokenizer, config)
    if has_bytes and (unknown := tokenizer.token_id(file["model"].get("unk_token") or "")) is not None:
        ids["unk"], types[unknown] = unknown, _UNKNOWN
    kind = _llama_fields(tokenizer, tokens, merges, size) if has_bytes else _gpt2_fields(file, merges)
    fields = {
        **kind,
        "tokenizer.ggml.tokens": [tokens.get(index, f"[PAD{index}]") for index in range(size)],
        "tokenizer.ggml.token_type": [types.get(index, _UNUSED) for index in range(size)],
        **{f"tokenizer.ggml.{_KEYS[name]}_token_id": index for name, index in ids.items()},
        **_tokens_around(tokenizer, ids),
        **({} if chat_template is None else {"tokenizer.chat_template": chat_template}),
    }
    back = Tokenizer(tokenizer_of_gguf(fields), tokenizer.name)
    is_same = set(_merges(json.loads(back.content))) == set(merges)
    if not is_same or any(back.encode(text) != tokenizer.encode(text) for text in PROBES):
        raise ValueError(_refusal(tokenizer))
    return fields


def _refusal(tokenizer: Tokenizer) -> str:
    return (
        f"llama.cpp has no tokenizer like {tokenizer.name}: it runs byte-level BPE, which data.tokenizer=bpe and "
        "data.tokenizer=bytes learn, and SentencePiece's BPE with a token for every byte"
    )


def _merges(file: Mapping[str, Any]) -> Pairs:
    """The merges of a tokenizer.json, of which older files have "a b" for a pair."""
    return [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in file["model"]["merges"]]


def _gpt2_fields(file: Mapping[str, Any], merges: Pairs) -> dict[str, Any]:
    parts = (file.get("pre_tokenizer") or {}).get("pretokenizers", ())
    regexes = [part["pattern"].get("Regex") for part in parts if part["type"] == "Split"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": next((name for name, regex in _WORDS.items() if regex in regexes), _GPT2),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges] or [_NO_MERGE],
    }


def _llama_fields(tokenizer: Tokenizer, tokens: Mapping[int, str], merges: Pairs, size: int) -> dict[str, Any]:
    scores: dict[str, float] = {}
    for rank, pair in enumerate(merges):
        scores.setdefault("".join(pair), -float(rank))
    first = tokenizer.token(next(iter(tokenizer.encode("a", special=False)), None)) or ""
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": [scores.get(tokens.get(index, ""), -float(len(merges))) for index in range(size)],
        "tokenizer.ggml.add_space_prefix": first.startswith(SPACE),
    }


def _special_ids(tokenizer: Tokenizer, config: ModelConfig) -> dict[str, int]:
    """Where texts begin and end, and padding. llama.cpp takes token 11 for the end where a file names none: a model
    that was never taught one gets the <eos> of a tokenizer learned here, which it does not write."""
    own = {"bos": EOS, "eos": EOS} if tokenizer.is_native else {}
    known = {"bos": config.bos_id, "eos": config.eos_id, "pad": config.pad_id}
    ids = own | {name: index for name, index in known.items() if index is not None}
    if "eos" not in ids:
        raise ValueError("the model has eos_id=None, and llama.cpp must know which token ends a text")
    return ids


def _tokens_around(tokenizer: Tokenizer, ids: Mapping[str, int]) -> dict[str, bool]:
    """Whether <bos> and <eos> are put around a text, as the tokenizer does."""
    plain, whole = tokenizer.encode("a", special=False), tokenizer.encode("a")
    bos, eos = [ids["bos"]] if "bos" in ids else [], [ids["eos"]]
    for before, after in ((False, False), (True, False), (False, True), (True, True)):
        if whole == bos * before + plain + eos * after:
            return {"tokenizer.ggml.add_bos_token": before, "tokenizer.ggml.add_eos_token": after}
    raise ValueError(f"{tokenizer.name} puts other tokens around a text than <bos> and <eos>, which GGUF cannot say")


def tokenizer_of_gguf(fields: Mapping[str, Any], name: str = "the GGUF file") -> bytes:
    """The tokenizer.json that the ``tokenizer.*`` fields of a GGUF file describe."""
    from tokenizers import AddedToken

    kind, tokens = fields.get("tokenizer.ggml.model"), list(fields.get("tokenizer.ggml.tokens", ()))
    types = fields.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    vocab = {token: index for index, token in enumerate(tokens) if types[index] != _UNUSED}
    if kind not in _BACKENDS:
        raise BadModelFile(f"{name} has a tokenizer of kind {kind!r}; regard reads {' and '.join(_BACKENDS)}")
    backend = _BACKENDS[kind](fields, vocab, name)
    for index, token in enumerate(tokens):
        if types[index] in (_CONTROL, _UNKNOWN):
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif types[index] == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, normalized=False)])
    _put_around(backend, fields, tokens)
    return backend.to_str(pretty=False).encode("utf-8")


def _gpt2_backend(fields: Mapping[str, Any], vocab: dict[str, int], name: str) -> Backend:
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    rule = fields.get("tokenizer.ggml.pre", _GPT2)
    if rule not in (_GPT2, *_WORDS):
        raise BadModelFile(f"{name} cuts texts into words as {rule!r}; regard knows {', '.join((_GPT2, *_WORDS))}")
    pairs = (merge.partition(" ") for merge in fields["tokenizer.ggml.merges"] if merge != _NO_MERGE or "ÿþ" in vocab)
    merges = [(left, right) for left, _, right in pairs]
    backend = Backend(models.BPE(vocab, merges, ignore_merges=rule == _TAKES_WHOLE_WORDS))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule == _GPT2)
    split = [] if rule == _GPT2 else [pre_tokenizers.Split(Regex(_WORDS[rule]), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, byte_level]) if split else byte_level
    backend.decoder = decoders.ByteLevel()
    return backend


def _llama_backend(fields: Mapping[str, Any], vocab: dict[str, int], name: str) -> Backend:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    tokens, scores = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"]
    unknown = fields.get("tokenizer.ggml.unknown_token_id", 0)
    merges = _merges_by_score(vocab, scores)
    backend = Backend(models.BPE(vocab, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    has_prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    prefix: list[Any] = [normalizers.Prepend(SPACE)] if has_prefix else []
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    spaces = decoders.Replace(SPACE, " ")
    backend.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


_BACKENDS = {"gpt2": _gpt2_backend, "llama": _llama_backend}


def _merges_by_score(vocab: Mapping[str, int], scores: Sequence[float]) -> Pairs:
    """Every pair of tokens whose result is a token, that with the highest score first: SentencePiece's order."""
    ranked = sorted(vocab.items(), key=lambda item: (-scores[item[1]], item[1]))
    splits = ((token[:at], token[at:]) for token, _ in ranked for at in range(1, len(token)))
    return [(left, right) for left, right in splits if left in vocab and right in vocab]


def _put_around(backend: Backend, fields: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """<bos> before and <eos> after each text, as the fields have it; llama.cpp's own default is <bos> for one kind."""
    from tokenizers import processors

    defaults = {"bos": fields["tokenizer.ggml.model"] == "llama", "eos": False}
    ids = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in defaults}
    wanted = {name: fields.get(f"tokenizer.ggml.add_{name}_token", default) for name, default in defaults.items()}
    marks = {name: (tokens[index], index) for name, index in ids.items() if wanted[name] and index is not None}
    if marks:
        bos, eos = ([marks[name][0]] if name in marks else [] for name in ("bos", "eos"))
        single, pair = [*bos, "$A", *eos], [*bos, "$A", *eos, "$B", *eos]
        backend.post_processor = processors.TemplateProcessing(single, pair, list(dict.fromkeys(marks.values())))
