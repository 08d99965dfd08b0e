"""`regard data describe` and `regard info`: the contents of a data source or a model directory."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from regard.errors import UsageError, silence_warnings

from . import completion, terminal
from .options import AsJson, Words, argument, flag, option

if TYPE_CHECKING:
    from regard.config import DataConfig
    from regard.data.sources import Source
    from regard.text.tokenizer import Tokenizer

data_app = typer.Typer(help="Look at data before training on it.", no_args_is_help=True)

# The special tokens that training adds to a text, which count towards its length.
_TEMPLATES: dict[str, Literal["none", "eos", "bos-eos"]] = {"text": "none", "labelled": "bos-eos", "tagged": "bos-eos"}
_MAX_TRAINING_EXAMPLES = 200_000
# The images of the embedded corpus are drawn one by one, and their captions repeat soon.
_MAX_IMAGES = 5_000


@data_app.command("describe")
def describe(
    source: Annotated[
        str,
        argument("SOURCE", "An embedded corpus, a file, two files a,b, a folder, or hf:name.", completion.sources),
    ],
    words: Words = None,
    tokenizer: Annotated[
        str | None, option("KIND", "chars, bytes, words, bpe, unigram or a tokenizer.json; none counts no tokens.")
    ] = None,
    max_len: Annotated[int | None, option("N", "Maximum number of tokens in a text.", least=1)] = None,
    examples: Annotated[int, typer.Option(min=0, metavar="N", help="Examples to show.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Show counts, lengths, repeats, train/valid leaks, bad lines, and what training would drop or truncate, and why.

    A file with bad lines is refused, and each line is named; data.bad_lines=skip leaves them out and counts them.
    """
    from regard.config import DataConfig
    from regard.config.overrides import build_section, parse_overrides

    options = {"tokenizer": tokenizer, "max_len": max_len}
    short = [f"data.{name}={value}" for name, value in options.items() if value is not None]
    fields = parse_overrides([f"data.source={source}", *short, *(words or [])], sections={"data": DataConfig})["data"]
    config = build_section("data", DataConfig, fields)
    kind = _tokenizer_kind(config)

    from regard.data.describe import describe as describe_source
    from regard.data.sources import open_source

    with silence_warnings("regard.data.sources"):  # the description lists the lines that were left out
        opened = open_source(config)
    n_train = len(opened.train)
    terminal.progress(f"{opened.name}: {n_train:,} example{'s' * (n_train != 1)}")
    if (schema := opened.schema) is not None and len(schema.names) > len(schema.columns):
        unread = ", ".join(name for name in schema.names if name not in schema.columns)
        terminal.progress(f"columns that are not read: {unread}; data.columns=… names those to read")
    first, second = _train_tokenizers(opened, kind, config)
    # A language model reads its documents in consecutive rows of max_len, so that nothing is cut off.
    limit = None if opened.kind == "text" else config.max_len
    limits: dict[str, Any] = {"max_len": limit, "max_target_len": config.max_target_len, "too_long": config.too_long}
    terminal.print_result(describe_source(opened, first, second, **limits, n_examples=examples), as_json)


def _tokenizer_kind(config: DataConfig) -> str:
    """The kind of tokenizer, checked before anything is read; auto is bpe, as in training."""
    from regard.config.data_config import TOKENIZER_FILES, TokenizerKind
    from regard.foundation.checks import did_you_mean

    kinds = get_args(TokenizerKind)
    kind = "bpe" if config.tokenizer == "auto" else config.tokenizer
    if kind not in (*kinds, "none") and not kind.endswith(TOKENIZER_FILES):
        files = "nor a tokenizer.json or a SentencePiece .model"
        raise UsageError(f"{kind!r} is not one of {', '.join(kinds)}, {files}{did_you_mean(kind, kinds)}")
    return kind


def _train_tokenizers(source: Source, kind: str, config: DataConfig) -> tuple[Tokenizer | None, Tokenizer | None]:
    """The tokenizers that training would use: one for both sides, or one for each."""
    from regard.config.data_config import TOKENIZER_FILES
    from regard.data.describe import texts_by_side
    from regard.data.examples import Chat, Preference
    from regard.text.sentencepiece_model import load_tokenizer
    from regard.text.tokenizer_training import train_tokenizer

    if kind == "none" or source.kind == "images":
        return None, None
    if kind.endswith(TOKENIZER_FILES):
        return load_tokenizer(kind), None
    terminal.progress(f"learning a tokenizer: {kind}")
    texts: list[str] = []
    targets: list[str] = []
    for example in islice(source.train, _MAX_IMAGES if source.name == "shapes" else _MAX_TRAINING_EXAMPLES):
        sides = texts_by_side(example)
        if isinstance(example, Chat | Preference):  # each message by itself
            sides["prompt"] = [content for _, content in example.prompt]
        for side, own in sides.items():
            (targets if side == "target" and not config.joint_vocab else texts).extend(own)
    size = config.vocab_size if kind in ("bpe", "unigram") else None
    template = _TEMPLATES.get(source.kind, "eos")
    tokenizers = [train_tokenizer(side, kind, size, template) for side in (texts, targets) if side]  # type: ignore[arg-type]  # _tokenizer_kind
    return tokenizers[0], tokenizers[1] if len(tokenizers) > 1 else None


def info(
    directory: Annotated[
        Path, argument("MODEL", "A run, or a model directory of regard or Hugging Face.", completion.models)
    ],
    verify: Annotated[bool, flag("--verify/--no-verify", "Compare every file with manifest.json.")] = True,
    allow_pickle: Annotated[
        bool, flag("--allow-pickle", "Read pytorch_model.bin if there is no safetensors file.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a model directory: architecture, parameters, config, files, and whether they match the manifest."""
    from regard.io import describe

    terminal.print_result(describe(directory, allow_pickle=allow_pickle, verify=verify), as_json)
