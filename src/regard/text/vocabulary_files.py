"""Tokenizers of model directories without a tokenizer.json, from the vocabularies that older ones hold.

vocab.txt                   WordPiece, as BERT has it: a token a line
vocab.json, merges.txt      byte-level BPE, as GPT-2, RoBERTa and BART have it
spiece.model                SentencePiece, as T5 has it: </s> at the end, <extra_id_99> … <extra_id_0> after the pieces

Each becomes the tokenizer.json that transformers makes of it. Classes that cut texts in another way are left alone.
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

# tokenizer_class of tokenizer_config.json; where there is none, the model_type of config.json.
_WORDPIECE = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "bert", "distilbert", "electra")
_BYTE_LEVEL = ("GPT2Tokenizer", "RobertaTokenizer", "BartTokenizer", "gpt2", "roberta", "bart")
_SENTENCEPIECE = ("T5Tokenizer", "MT5Tokenizer", "t5", "mt5")
_EXTRA_IDS = 100  # T5's sentinels, unless tokenizer_config.json says otherwise


def read_vocabulary(directory: ModelFiles, fields: Mapping[str, Any], settings: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer of a directory with such files; None where there are none, or of another class.

    ``fields`` are those of config.json, ``settings`` those of tokenizer_config.json.
    """
    given = settings.get("tokenizer_class") or fields.get("model_type") or ""
    kind = str(given).removesuffix("Fast")
    if kind in _WORDPIECE and directory.has("vocab.txt"):
        backend = _word_piece(directory, settings)
    elif kind in _BYTE_LEVEL and directory.has("vocab.json") and directory.has("merges.txt"):
        backend = _byte_level(directory, settings)
    elif kind in _SENTENCEPIECE and directory.has("spiece.model"):
        name = str(directory.root / "spiece.model")
        extra = [f"<extra_id_{n}>" for n in reversed(range(settings.get("extra_ids", _EXTRA_IDS)))]
        return SentencePieceModel.parse(directory.bytes("spiece.model"), name).tokenizer("eos", name, added=extra)
    else:
        return None
    return Tokenizer(backend.to_str(pretty=False).encode("utf-8"), str(directory.root / "vocabulary"))


def _word_piece(directory: ModelFiles, settings: Mapping[str, Any]) -> Backend:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    lines = directory.bytes("vocab.txt").decode("utf-8").removesuffix("\n").split("\n")  # other breaks are tokens
    vocab = {line.rstrip("\r"): index for index, line in enumerate(lines)}
    names = {
        part: _text(settings, f"{part}_token", f"[{part.upper()}]") for part in ("pad", "unk", "cls", "sep", "mask")
    }
    if missing := [name for name in names.values() if name not in vocab]:
        raise BadModelFile(f"{directory.root / 'vocab.txt'} has no token {missing[0]!r}")
    backend = Backend(models.WordPiece(vocab, unk_token=names["unk"]))
    backend.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.get("do_lower_case", True),
    )
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    cls, sep = ((names[part], vocab[names[part]]) for part in ("cls", "sep"))
    single, pair = f"{cls[0]} $A {sep[0]}", f"{cls[0]}:0 $A:0 {sep[0]}:0 $B:1 {sep[0]}:1"
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=[cls, sep])
    backend.add_special_tokens(list(names.values()))
    return backend


def _byte_level(directory: ModelFiles, settings: Mapping[str, Any]) -> Backend:
    """With <s> and </s> among its tokens, texts stand between them, as in RoBERTa and BART."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend

    vocab: dict[str, int] = directory.json("vocab.json")
    lines = directory.bytes("merges.txt").decode("utf-8").splitlines()
    merges: list[Any] = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    if any(len(pair) != 2 for pair in merges) or not all(isinstance(index, int) for index in vocab.values()):
        raise BadModelFile(f"{directory.root / 'merges.txt'} and vocab.json are not those of a byte-level BPE")
    spaced = bool(settings.get("add_prefix_space", False))
    try:
        backend = Backend(models.BPE(vocab, merges, fuse_unk=False))
    except Exception as error:  # the library raises plain exceptions
        raise BadModelFile(f"{directory.root / 'merges.txt'} does not fit vocab.json: {error}") from None
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    backend.decoder = decoders.ByteLevel()
    if {"<s>", "</s>"} <= vocab.keys():
        ends = ("</s>", vocab["</s>"]), ("<s>", vocab["<s>"])
        backend.post_processor = processors.RobertaProcessing(*ends, trim_offsets=True, add_prefix_space=spaced)
    special = [x for x in ("<s>", "<pad>", "</s>", "<unk>", "<|endoftext|>") if x in vocab]
    backend.add_special_tokens(list(special))
    if "<mask>" in vocab:  # it takes the space before it along, as in the tokenizer.json that RoBERTa ships
        backend.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True, normalized=False)])
    return backend


def _text(settings: Mapping[str, Any], name: str, usual: str) -> str:
    """A special token, written as a text or as an object with its content."""
    given = settings.get(name) or usual
    return str(given["content"] if isinstance(given, Mapping) else given)
