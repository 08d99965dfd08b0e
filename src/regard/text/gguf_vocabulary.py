"""Conversion between a tokenizer.json and the ``tokenizer.*`` fields of a GGUF file.

llama.cpp implements two kinds of BPE, and names the rules that split a text into words before byte-level BPE:

- ``gpt2``: byte-level BPE with a list of merges, as regard trains it;
- ``llama``: SentencePiece's BPE, which merges the pair whose result has the highest score, with a token for every byte.

Every other tokenizer is refused. The written fields are read back, and the result must give the same ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..config import ModelConfig
from ..errors import BadModelFile
from .tokenizer import EOS, SPACE, Tokenizer, library_errors_as_bad_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

Pairs = list[tuple[str, str]]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # llama.cpp's types of tokens
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The regular expression for words of each pre-tokenizer that llama.cpp names; "gpt-2" is the library's own default.
_GPT2 = "gpt-2"
_WORDS = {"llama-bpe": rf"{_LETTERS}|\p{{N}}{{1,3}}|{_OTHERS}", "qwen2": rf"{_LETTERS}|\p{{N}}|{_OTHERS}"}
_IGNORES_MERGES = "llama-bpe"  # the pre-tokenizer with which a word that is a token is not merged from its bytes
_NO_MERGE = "ÿ þ"  # llama.cpp requires at least one merge; no UTF-8 text contains these two bytes
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# Texts on which different tokenizers differ: contractions, numbers, spaces, newlines, scripts, multi-byte characters.
PROBES = (
    "Don't stop; it's 12345 km.\n\n  Two  spaces\tand a tab \r\n",
    "가나다 한국어 문장입니다. 값이 3,000원",
    "naïve ß Ω 漢字 かな 😀👩‍👩‍👧 ½",
    "x = [i**2 for i in range(10)]  # code",
    "",
)


def gguf_vocabulary(tokenizer: Tokenizer, config: ModelConfig, chat_template: str | None = None) -> dict[str, Any]:
    """The ``tokenizer.*`` fields of a GGUF file; raises ValueError if llama.cpp has no equivalent tokenizer."""
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
    fields = {
        **(_llama_fields(tokenizer, tokens, merges, size) if has_bytes else _gpt2_fields(file, merges)),
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
    """The merges of a tokenizer.json; older files write a pair as the string "a b"."""
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
    """The ids of bos, eos and pad.

    If a file names no eos, llama.cpp assumes token 11. A model trained without one therefore gets the <eos> of its
    native tokenizer, which it never generates.
    """
    defaults = {"bos": EOS, "eos": EOS} if tokenizer.is_native else {}
    configured = {"bos": config.bos_id, "eos": config.eos_id, "pad": config.pad_id}
    ids = defaults | {name: index for name, index in configured.items() if index is not None}
    if "eos" not in ids:
        raise ValueError("the model has eos_id=None, but llama.cpp must know which token ends a text")
    return ids


def _tokens_around(tokenizer: Tokenizer, ids: Mapping[str, int]) -> dict[str, bool]:
    """The fields that say whether the tokenizer puts <bos> and <eos> around a text."""
    plain, whole = tokenizer.encode("a", special=False), tokenizer.encode("a")
    bos = [ids["bos"]] if "bos" in ids else []
    eos = [ids["eos"]]
    for before, after in ((False, False), (True, False), (False, True), (True, True)):
        if whole == bos * before + plain + eos * after:
            return {"tokenizer.ggml.add_bos_token": before, "tokenizer.ggml.add_eos_token": after}
    raise ValueError(f"{tokenizer.name} adds special tokens other than <bos> and <eos>, which GGUF cannot express")


def tokenizer_of_gguf(fields: Mapping[str, Any], name: str = "the GGUF file") -> bytes:
    """The tokenizer.json that the ``tokenizer.*`` fields of a GGUF file describe."""
    from tokenizers import AddedToken

    kind, tokens = fields.get("tokenizer.ggml.model"), list(fields.get("tokenizer.ggml.tokens", ()))
    types = fields.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    vocab = {token: index for index, token in enumerate(tokens) if types[index] != _UNUSED}
    if kind not in _BACKENDS:
        raise BadModelFile(f"{name} has a tokenizer of type {kind!r}; regard reads {' and '.join(_BACKENDS)}")
    with library_errors_as_bad_file(name):
        backend = _BACKENDS[kind](fields, vocab, name)
    for index, token in enumerate(tokens):
        if types[index] in (_CONTROL, _UNKNOWN):
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif types[index] == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, normalized=False)])
    _set_template(backend, fields, tokens)
    return backend.to_str(pretty=False).encode("utf-8")


def _gpt2_backend(fields: Mapping[str, Any], vocab: dict[str, int], name: str) -> Backend:
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    rule = fields.get("tokenizer.ggml.pre", _GPT2)
    if rule not in (_GPT2, *_WORDS):
        raise BadModelFile(f"{name} has the pre-tokenizer {rule!r}; regard reads {', '.join((_GPT2, *_WORDS))}")
    pairs = (merge.partition(" ") for merge in fields["tokenizer.ggml.merges"] if merge != _NO_MERGE or "ÿþ" in vocab)
    merges = [(left, right) for left, _, right in pairs]
    backend = Backend(models.BPE(vocab, merges, ignore_merges=rule == _IGNORES_MERGES))
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
    """All pairs of tokens whose concatenation is a token, by its score, highest first, as SentencePiece merges."""
    ranked = sorted(vocab.items(), key=lambda item: (-scores[item[1]], item[1]))
    splits = ((token[:at], token[at:]) for token, _ in ranked for at in range(1, len(token)))
    return [(left, right) for left, right in splits if left in vocab and right in vocab]


def _set_template(backend: Backend, fields: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """Make ``backend`` add <bos> and <eos> as the fields say; without them llama.cpp adds <bos> for ``llama`` only."""
    from tokenizers import processors

    defaults = {"bos": fields["tokenizer.ggml.model"] == "llama", "eos": False}
    ids = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in defaults}
    is_added = {name: fields.get(f"tokenizer.ggml.add_{name}_token", default) for name, default in defaults.items()}
    special = {name: (tokens[index], index) for name, index in ids.items() if is_added[name] and index is not None}
    if special:
        bos, eos = ([special[name][0]] if name in special else [] for name in ("bos", "eos"))
        single, pair = [*bos, "$A", *eos], [*bos, "$A", *eos, "$B", *eos]
        backend.post_processor = processors.TemplateProcessing(single, pair, list(dict.fromkeys(special.values())))
