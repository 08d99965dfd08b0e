"""Tokenizers from the vocabulary files of older model directories, which have no tokenizer.json.

vocab.txt                   WordPiece (BERT), one token per line
vocab.json, merges.txt      byte-level BPE (GPT-2, RoBERTa, BART)
spiece.model                SentencePiece (T5): </s> ends a text, <extra_id_99> … <extra_id_0> follow the pieces

Each is converted to the same tokenizer.json as in transformers, with the tokens of added_tokens.json and of
tokenizer_config.json. Other tokenizer classes are not converted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import BadModelFile
from .sentencepiece_model import SentencePieceModel
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from .processor import ModelFiles

# Values of tokenizer_class in tokenizer_config.json, or without it of model_type in config.json.
_WORDPIECE = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "bert", "distilbert", "electra")
_ROBERTA = ("RobertaTokenizer", "BartTokenizer", "roberta", "bart")  # <s> and </s> are put around a text
_GPT2 = ("GPT2Tokenizer", "gpt2")  # the start and the end token are added if tokenizer_config.json says so
_SENTENCEPIECE = ("T5Tokenizer", "MT5Tokenizer", "t5", "mt5")
_EXTRA_IDS = 100  # T5's sentinels, unless tokenizer_config.json says otherwise
_ROLES = [f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token


def read_vocabulary(directory: ModelFiles, fields: Mapping[str, Any], settings: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer of a directory with such files; None if there are none or the tokenizer class is another one.

    ``fields`` is the content of config.json, ``settings`` that of tokenizer_config.json.
    """
    from tokenizers import Tokenizer as Backend

    kind = str(settings.get("tokenizer_class") or fields.get("model_type") or "").removesuffix("Fast")
    if kind in _WORDPIECE and directory.has("vocab.txt"):
        backend = _word_piece(directory, settings)
    elif kind in (*_ROBERTA, *_GPT2) and directory.has("vocab.json") and directory.has("merges.txt"):
        backend = _byte_level(directory, settings, has_ends=kind in _ROBERTA)
    elif kind in _SENTENCEPIECE and directory.has("spiece.model"):
        name = str(directory.root / "spiece.model")
        extra = [f"<extra_id_{n}>" for n in reversed(range(settings.get("extra_ids", _EXTRA_IDS)))]
        model = SentencePieceModel.parse(directory.bytes("spiece.model"), name)
        backend = Backend.from_buffer(model.tokenizer("eos", name, added=extra).content)
    else:
        return None
    _add_tokens(backend, directory, settings)
    if kind in _GPT2:
        _add_ends(backend, settings)
    return Tokenizer(backend.to_str(pretty=False).encode("utf-8"), str(directory.root / "vocabulary"))


def _add_tokens(backend: Backend, directory: ModelFiles, settings: Mapping[str, Any]) -> None:
    """Add the tokens that the vocabulary file lacks: first those that have an id, then the other special ones."""
    from tokenizers import AddedToken, models

    tokens: dict[Any, Any] = settings.get("added_tokens_decoder") or {}
    if not tokens and directory.has("added_tokens.json"):
        tokens = {index: token for token, index in directory.json("added_tokens.json").items()}
    special = [settings[role] for role in _ROLES if settings.get(role)]
    special += settings.get("additional_special_tokens") or []
    names = {_text(token) for token in special}
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    with_ids = sorted((int(index), token) for index, token in tokens.items())
    for index, token in [*with_ids, *((None, token) for token in special)]:
        text = _text(token)
        options = {"special": text in names, "normalized": text not in names}
        options |= {name: token[name] for name in _OPTIONS if isinstance(token, Mapping) and name in token}
        if isinstance(backend.model, models.Unigram):
            options["normalized"] = False  # SentencePiece's normaliser would put a ▁ before the token
        if text not in known:
            backend.add_tokens([AddedToken(text, **options)])
            known.add(text)
        if index not in (None, backend.token_to_id(text)):
            raise ValueError(f"{text!r} has the id {index} there, but {backend.token_to_id(text)} in the vocabulary")


def _word_piece(directory: ModelFiles, settings: Mapping[str, Any]) -> Backend:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    # Not splitlines(): other line separators such as U+2028 may be tokens.
    lines = directory.bytes("vocab.txt").decode("utf-8").removesuffix("\n").split("\n")
    vocab = {line.rstrip("\r"): index for index, line in enumerate(lines)}
    roles = ("pad", "unk", "cls", "sep", "mask")
    names = {role: _text(settings.get(f"{role}_token") or f"[{role.upper()}]") for role in roles}
    if missing := [name for name in names.values() if name not in vocab]:
        raise BadModelFile(f"{directory.root / 'vocab.txt'} has no token {missing[0]!r}")
    backend = Backend(models.WordPiece(vocab, unk_token=names["unk"]))
    backend.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.get("do_lower_case", True),
    )
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    cls, sep = ((names[role], vocab[names[role]]) for role in ("cls", "sep"))
    single, pair = f"{cls[0]} $A {sep[0]}", f"{cls[0]}:0 $A:0 {sep[0]}:0 $B:1 {sep[0]}:1"
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=[cls, sep])
    backend.add_special_tokens(list(names.values()))
    return backend


def _byte_level(directory: ModelFiles, settings: Mapping[str, Any], has_ends: bool) -> Backend:
    """Byte-level BPE; with ``has_ends``, <s> and </s> are put around a text if the vocabulary has them."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend

    vocab: dict[str, int] = directory.json("vocab.json")
    lines = directory.bytes("merges.txt").decode("utf-8").splitlines()
    merges: list[Any] = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    if any(len(pair) != 2 for pair in merges) or not all(isinstance(index, int) for index in vocab.values()):
        raise BadModelFile(f"{directory.root / 'merges.txt'} and vocab.json do not describe a byte-level BPE")
    prefix_space = bool(settings.get("add_prefix_space", False))
    try:
        backend = Backend(models.BPE(vocab, merges, fuse_unk=False))
    except Exception as error:  # the library raises plain exceptions
        raise BadModelFile(f"{directory.root / 'merges.txt'} does not fit vocab.json: {error}") from None
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    backend.decoder = decoders.ByteLevel()
    special = ("<s>", "<pad>", "</s>", "<unk>") if has_ends else ("<|endoftext|>",)
    backend.add_special_tokens([x for x in special if x in vocab])
    if not has_ends or not {"<s>", "</s>"} <= vocab.keys():
        return backend
    sep, cls = ("</s>", vocab["</s>"]), ("<s>", vocab["<s>"])
    backend.post_processor = processors.RobertaProcessing(sep, cls, trim_offsets=True, add_prefix_space=prefix_space)
    if "<mask>" in vocab:  # lstrip: the token includes the space before it, as in RoBERTa's own tokenizer.json
        backend.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True, normalized=False)])
    return backend


def _add_ends(backend: Backend, settings: Mapping[str, Any]) -> None:
    """Put the start and the end token around a text, each if ``add_bos_token`` or ``add_eos_token`` says so."""
    from tokenizers import processors

    wanted = [end for end in ("bos", "eos") if settings.get(f"add_{end}_token")]
    ends = {end: _text(settings.get(f"{end}_token") or "<|endoftext|>") for end in wanted}
    single = [x for x in (ends.get("bos"), "$A", ends.get("eos")) if x is not None]
    tokens = [(text, backend.token_to_id(text)) for text in set(ends.values())]
    if missing := [text for text, index in tokens if index is None]:
        raise ValueError(f"{missing[0]!r} begins or ends a text, but is not in the vocabulary")
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)


def _text(token: Any) -> str:
    """The text of a token of tokenizer_config.json, which is a string or an object with a ``content``."""
    return str(token["content"] if isinstance(token, Mapping) else token)
