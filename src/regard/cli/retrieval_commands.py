"""`regard embed`, `index` and `answer`: texts as vectors, an index of passages, and questions answered from it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from regard.errors import UsageError

from . import completion, terminal
from .options import (
    AsJson,
    Beam,
    Column,
    Device,
    Dtype,
    Encoding,
    ModelPath,
    NewTokens,
    RecordsFile,
    argument,
    flag,
    option,
)


def embed(
    model: ModelPath,
    texts: Annotated[list[str] | None, argument("TEXT", "Given here, with --file, or as lines piped in.")] = None,
    file: RecordsFile = None,
    column: Column = None,
    encoding: Encoding = "auto",
    out: Annotated[
        Path | None, option("FILE", "Write to this file: .npy, an array with a row per text, or .jsonl.")
    ] = None,
    prompt: Annotated[str | None, option("NAME", "A prompt of the model to put before each text.")] = None,
    device: Device = "auto",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Print the vector of each text as a line of JSON; texts with similar meanings have similar vectors.

    A sentence-transformers directory defines how its vectors are pooled; other text models give the mean of their
    states.
    """
    from regard.generation.text_embeddings import check_can_embed, embed_file, embedding_line
    from regard.generation.text_embeddings import embed as run

    terminal.check_out(out, source=file)
    records = terminal.read_records(texts, file, column, encoding, stream=False)
    assert records is not None
    opened = terminal.open_model(model, device, dtype=dtype)
    check_can_embed(opened)
    if out is not None:
        written = embed_file(opened, records, out, prompt=prompt, progress=terminal.progress)
        terminal.print_result(written, as_json)
        return
    inputs = [record.text for record in records.read()]
    vectors = run(opened, inputs, prompt=prompt).tolist()
    if as_json:
        results = [{"input": text, "embedding": vector} for text, vector in zip(inputs, vectors, strict=True)]
        terminal.print_json({"model": model, "results": results})
        return
    for text, vector in zip(inputs, vectors, strict=True):
        print(embedding_line(text, vector))


def index(
    paths: Annotated[list[Path], argument("FILE… OUT", "Text files or tables, then a new folder.")],
    model: Annotated[
        str,
        typer.Option(help="The model that embeds passages, as for `regard embed`.", autocompletion=completion.models),
    ],
    words: Annotated[int, typer.Option(min=1, help="Maximum number of words in a passage.")] = 100,
    graph: Annotated[bool, flag("--graph", "Also build a FAISS graph, for more than a million passages.")] = False,
    column: Column = None,
    encoding: Encoding = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Make an index of passages that can be searched by meaning: regard index notes.txt papers.csv OUT --model DIR.

    A text file is split into passages; each row of a table is one. `regard answer` looks questions up in the index.
    """
    *files, out = paths
    if not files:
        raise UsageError("regard index takes files and a folder for the result: notes.txt OUT")
    from regard.generation.passage_index import build_index

    options: dict[str, Any] = {"words": words, "column": column, "encoding": encoding, "graph": graph}
    device = terminal.device_name(device)
    with terminal.usage_errors("column", "encoding"):
        summary = build_index(files, out, model=model, **options, device=device, progress=terminal.progress)
    terminal.print_result(summary, as_json)


def answer(
    model: ModelPath,
    questions: Annotated[
        list[str] | None, argument("QUESTION", "Given here, with --file, or as lines piped in.")
    ] = None,
    index: Annotated[Path | None, option("DIR", "The index to look passages up in, from `regard index`.")] = None,
    passage: Annotated[list[str] | None, option("TEXT", "Read this passage instead; repeatable.")] = None,
    passages: Annotated[int, typer.Option(min=1, metavar="N", help="Number of passages to read from the index.")] = 5,
    prompt: Annotated[str | None, option("NAME", "A prompt of the index's model to put before each question.")] = None,
    file: RecordsFile = None,
    column: Column = None,
    encoding: Encoding = "auto",
    beam: Beam = None,
    max_new_tokens: NewTokens = None,
    device: Device = "auto",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Answer questions from passages, and name the passage that each word comes from.

    The encoder reads each passage with the question separately; the decoder attends to all of them (Fusion-in-Decoder).
    A word's source is the passage that the decoder attended to most.
    """
    options = terminal.check_generation(beam=beam, max_new_tokens=max_new_tokens)
    if (index is None) == (not passage):
        raise UsageError("give either --index DIR, in which passages are looked up, or --passage TEXT")
    records = terminal.read_records(questions, file, column, encoding, stream=False)
    assert records is not None
    inputs = [record.text for record in records.read() if record.text.strip()]
    from regard.generation import answer as run

    opened = terminal.open_model(model, device, dtype=dtype)
    source = {"index": index, "n_passages": passages} if index is not None else {"passages": [passage] * len(inputs)}
    answers = run(opened, inputs, prompt=prompt, **source, **options)
    if as_json:
        terminal.print_json({"model": model, "results": [answer.to_dict() for answer in answers]})
        return
    print("\n\n".join(answer.to_text() for answer in answers))
