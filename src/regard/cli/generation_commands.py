"""`regard generate`, `translate`, `classify` and `caption`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.errors import UsageError

from . import terminal
from .bulk_answers import answer_to_dict, check_files, join_texts, predict, text_answerer, text_lines
from .options import (
    AsJson,
    Beam,
    Column,
    Device,
    Dtype,
    Encoding,
    Jobs,
    LengthPenalty,
    ModelEngine,
    ModelPath,
    NewTokens,
    On,
    Out,
    RecordsFile,
    Stream,
    Truncate,
    argument,
    engine_option,
    flag,
    option,
)
from .terminal import without_none

if TYPE_CHECKING:
    from regard.generation.bulk_prediction import Answer, Answerer
    from regard.models import Model


_SEARCH_OPTIONS = (  # options of `regard generate` that are named like the fields of GenerateConfig
    *("max_new_tokens", "min_new_tokens", "beam", "length_penalty", "n_best", "temperature", "top_k", "top_p", "min_p"),
    *("seed", "repetition_penalty", "no_repeat_ngram"),
)


def generate(
    ctx: typer.Context,
    model: ModelPath,
    prompt: Annotated[str | None, argument("PROMPT", "Given here, with --file, or as text piped in.")] = None,
    file: RecordsFile = None,
    lines: Annotated[bool, flag("--lines", "Each line of the file or the pipe is a prompt.")] = False,
    column: Column = None,
    out: Out = None,
    stream: Stream = False,
    encoding: Encoding = "auto",
    max_new_tokens: NewTokens = None,
    min_new_tokens: Annotated[int | None, option("N", "Minimum number of new tokens.", least=0)] = None,
    beam: Beam = None,
    length_penalty: LengthPenalty = None,
    n_best: Annotated[int | None, option("N", "Number of texts per prompt.", least=1)] = None,
    temperature: Annotated[float | None, option("T", "Sample tokens; higher values are more random.")] = None,
    top_k: Annotated[int | None, option("K", "Sample among the K likeliest tokens.")] = None,
    top_p: Annotated[float | None, option("P", "Sample among the likeliest tokens of total probability P.")] = None,
    min_p: Annotated[
        float | None, option("P", "Sample among tokens at least P times as likely as the likeliest.")
    ] = None,
    seed: Annotated[int | None, option(None, "Seed of the sampling.")] = None,
    repetition_penalty: Annotated[float | None, option("R", "Above 1, repeated tokens become less likely.")] = None,
    no_repeat_ngram: Annotated[int | None, option("N", "Never repeat N tokens in a row.", least=0)] = None,
    stop: Annotated[list[str] | None, option("TEXT", "Stop before this text; repeatable.")] = None,
    stop_token: Annotated[list[str] | None, option("TOKEN", "Stop at this token, a word or an id.")] = None,
    bias: Annotated[list[str] | None, option("TOKEN=X", "Add X to a token's logit; -inf forbids it.")] = None,
    prefix: Annotated[str | None, option("TEXT", "Begin every text with this.")] = None,
    truncate: Truncate = False,
    draft: Annotated[str | None, option("MODEL", "A small draft model for speculative decoding.")] = None,
    draft_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens drafted at a time.")] = 4,
    system: Annotated[str | None, option("TEXT", "System message for a chat model.")] = None,
    raw: Annotated[
        bool, flag("--raw", "Continue the prompt as it is, without the chat template of the model.")
    ] = False,
    echo: Annotated[bool, flag("--echo", "Print the prompt before the text.")] = False,
    engine: ModelEngine = "torch",
    on: On = "local",
    jobs: Jobs = None,
    device: Device = "auto",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt. The text is printed as it is generated; with --json, --beam or several prompts, at the end.

    A model with a chat template, such as one from `regard train sft`, answers the prompt as a message.
    """
    options = terminal.check_generation(**{name: ctx.params[name] for name in _SEARCH_OPTIONS})
    if seed is not None and options.keys().isdisjoint(("temperature", "top_k", "top_p", "min_p")):
        raise UsageError(f"--seed {seed} is for sampling: --temperature T, --top-k, --top-p or --min-p sample")
    from regard.data.record_files import form_of
    from regard.generation.text_generation import check_can_continue

    check_files(ctx)
    is_bulk = lines or stream or out is not None or (file is not None and form_of(file) != "lines")
    text = None if is_bulk else terminal.read_prompt(prompt, file, column, encoding)
    opened = terminal.open_model(model, device, engine, dtype)
    check_can_continue(opened)
    options |= {**without_none(prefix=prefix), "truncate": truncate, **_token_options(opened, stop, stop_token, bias)}
    as_inputs = _message_writer(opened, system, raw)
    if draft is not None:
        options |= {"draft": terminal.open_model(draft, device, dtype=dtype), "draft_tokens": draft_tokens}
    if text is None:
        answerer = _prompt_answerer(opened, options, echo, as_inputs)
        typed = None if prompt is None else [prompt]
        source = terminal.read_records(typed, file, column, encoding, stream=stream)
        others = ("file", "out", "on", "jobs", "device", "as_json")
        settings = {name: value for name, value in ctx.params.items() if name not in others}
        predict(ctx, model, opened.config.max_len, answerer, source, out, as_json, settings)
        return
    from regard.generation import generate as run

    if not as_json and draft is None and (beam or 1) == 1 and (n_best or 1) == 1:
        _print_stream(opened, as_inputs([text])[0], text if echo else "", options)
        return
    generated = run(opened, as_inputs([text]), **options)
    if as_json:
        terminal.print_json(_to_dict(model, text, generated))
        return
    _report_draft(generated)
    print(text_lines({**answer_to_dict(generated.n_best[0]), **({"echo": text} if echo else {})}))


def _print_stream(model: Model, prompt: Any, echo: str, options: dict[str, Any]) -> None:
    """Print ``echo``, then a text piece by piece as it is generated."""
    from regard.generation import stream

    pieces = stream(model, prompt, **options)
    first = next(pieces, "")  # an error is raised here, before anything is printed
    for piece in chain([echo + first], pieces, ["\n"]):
        sys.stdout.write(piece)
        sys.stdout.flush()


def _prompt_answerer(
    model: Model, options: dict[str, Any], echo: bool, as_inputs: Callable[[list[str]], list[Any]]
) -> Answerer:
    from regard.generation import generate as run
    from regard.generation.bulk_prediction import text_check
    from regard.generation.text_generation import text_tokenizers

    def answer(prompts: list[str]) -> list[Answer]:
        generated = run(model, as_inputs(prompts), **options)
        _report_draft(generated)
        answers = [answer_to_dict(texts) for texts in generated.n_best]
        return [{"echo": text, **x} for text, x in zip(prompts, answers, strict=True)] if echo else answers

    def encode(prompts: list[str]) -> list[list[int]]:
        return text_tokenizers(model).encode_inputs(as_inputs(prompts))

    check = text_check(encode, model.config, options["truncate"])
    return text_answerer(answer, "generated", check, n_best=options.get("n_best", 1))


def _report_draft(generated: Any) -> None:
    if (draft_counts := generated.drafted) is not None:
        counts = f"{draft_counts.accepted:,} of {draft_counts.proposed:,} tokens"
        terminal.progress(f"draft: {counts} were accepted ({draft_counts.share:.1%})")


def _message_writer(model: Model, system: str | None, raw: bool) -> Callable[[list[str]], list[Any]]:
    """A function that turns prompts into chats if the model has a chat template, else returns them unchanged."""
    is_chat_model = model.is_decoder_only and getattr(model.processor, "chat_template", None) is not None
    if raw or not is_chat_model:
        if system is not None:
            reason = "--raw leaves it out" if raw else "this model has none"
            raise UsageError(f"--system needs a chat template, and {reason}")
        return lambda prompts: prompts
    before = [] if system is None else [{"role": "system", "content": system}]
    return lambda prompts: [[*before, {"role": "user", "content": prompt}] for prompt in prompts]


def _token_options(
    model: Model, stop: list[str] | None, stop_token: list[str] | None, bias: list[str] | None
) -> dict[str, Any]:
    """The options --stop, --stop-token and --bias, with tokens as ids."""
    from regard.generation.text_codec import ModelTokenizers

    tokenizers, options = ModelTokenizers(model), dict[str, Any]()
    if stop or stop_token:
        options["stop"] = [*(stop or ()), *(tokenizers.token_id(_id_or_word(token)) for token in stop_token or ())]
    biases: dict[int | str, float] = {}
    for word in bias or ():
        token, _, value = word.rpartition("=")
        try:
            biases[_id_or_word(token)] = float(value)
        except ValueError:
            token = ""
        if not token:
            raise UsageError(f"--bias {word!r} is not TOKEN=NUMBER")
    return options | ({"logit_bias": biases} if biases else {})


def _id_or_word(token: str) -> int | str:
    return int(token) if token.isdecimal() else token


def _to_dict(model: str, prompt: str, generated: Any) -> dict[str, Any]:
    """The document of `--json`."""
    document: dict[str, Any] = {"model": model}
    if (counts := generated.drafted) is not None:
        document["draft"] = {"proposed": counts.proposed, "accepted": counts.accepted, "share": counts.share}
    return {**document, "results": [{"input": prompt, **answer_to_dict(generated.n_best[0])}]}


_ENGINES = ("torch", "onnx", "ctranslate2")


def translate(
    ctx: typer.Context,
    model: ModelPath,
    texts: Annotated[list[str] | None, argument("TEXT", "Given here, with --file, or as lines piped in.")] = None,
    file: RecordsFile = None,
    column: Column = None,
    stream: Stream = False,
    encoding: Encoding = "auto",
    beam: Annotated[int, typer.Option(min=1, metavar="K", help="Beam width; 1 is greedy.")] = 4,
    length_penalty: LengthPenalty = None,
    n_best: Annotated[
        int | None, option("N", "Translations per text, best first, each preceded by its score.", least=1)
    ] = None,
    prefix: Annotated[str | None, option("TEXT", "Begin every translation with this.")] = None,
    source_language: Annotated[
        str | None,
        typer.Option("--from", metavar="LANG", help="Source language of a multilingual model: eng_Latn, or en."),
    ] = None,
    target_language: Annotated[
        str | None, typer.Option("--to", metavar="LANG", help="The language to translate into.")
    ] = None,
    glossary: Annotated[
        Path | None, option("FILE", "Terms to use: on each line a source term, a tab, its translation.")
    ] = None,
    max_new_tokens: NewTokens = None,
    truncate: Truncate = False,
    engine: Annotated[str, engine_option("Engine that runs the model", *_ENGINES)] = "torch",
    out: Out = None,
    on: On = "local",
    jobs: Jobs = None,
    device: Device = "auto",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Translate texts, a file line by line, or a column of a table; a blank line stays blank.

    With --glossary, the translation of a text that contains a term contains the term's translation.
    """
    from regard.generation.glossary import Glossary

    if engine not in _ENGINES:
        raise UsageError(f"--engine {engine} is not one of {', '.join(_ENGINES)}")
    if texts and not all(text.strip() for text in texts):
        raise UsageError("a text to translate is empty")
    options = terminal.check_generation(
        beam=beam, length_penalty=length_penalty, n_best=n_best, max_new_tokens=max_new_tokens, truncate=truncate
    )
    check_files(ctx)
    options |= without_none(prefix=prefix, source_language=source_language, target_language=target_language)
    settings = {"engine": engine, "dtype": dtype, **options}
    if glossary is not None:
        options["glossary"] = Glossary.read(glossary)
        settings["glossary"] = options["glossary"].terms
    records = terminal.read_records(texts, file, column, encoding, stream=stream)
    if engine == "ctranslate2":
        unsupported = {"--n-best": n_best, "--prefix": prefix, "--glossary": glossary, "--dtype": dtype}
        unsupported |= {"--from": source_language, "--to": target_language}
        for name, value in unsupported.items():
            if value is not None:
                raise UsageError(f"--engine ctranslate2 does not support {name}; torch and onnx do")
        answerer, max_len = _ctranslate2_translator(model, options)
    else:
        opened = terminal.open_model(model, device, engine, dtype)
        answerer, max_len = _model_translator(opened, options), opened.config.max_len
    predict(ctx, model, max_len, answerer, records, out, as_json, settings, engine=engine)


def _model_translator(model: Model, options: dict[str, Any]) -> Answerer:
    from regard.generation import translate as run
    from regard.generation.bulk_prediction import text_check
    from regard.generation.text_generation import check_can_translate, text_tokenizers

    check_can_translate(model)

    def answer(texts: list[str]) -> list[Answer]:
        translated = run(model, texts, **options)
        for text, best in zip(texts, translated.best, strict=True):
            if best.missing_terms:
                terms = f"the term{'s' * (len(best.missing_terms) > 1)} {', '.join(best.missing_terms)}"
                terminal.progress(f"{text!r:.60} is translated without {terms}: no room, or no tokens to write it with")
        return [
            join_texts([{"text": terminal.one_line(x.text), "score": x.score} for x in texts])
            for texts in translated.n_best
        ]

    check = text_check(text_tokenizers(model).encode_inputs, model.config, options["truncate"])
    return text_answerer(answer, "translation", check, n_best=options.get("n_best", 1))


def _ctranslate2_translator(path: str, options: dict[str, Any]) -> tuple[Answerer, int]:
    """An answerer that runs an exported model in CTranslate2, and the longest text that the model reads."""
    from regard.export.engines import open_engine
    from regard.foundation.plugins import import_optional
    from regard.generation.bulk_prediction import text_check

    terminal.check_export(path, "ctranslate2")
    import_optional("ctranslate2", "--engine ctranslate2", "export")
    opened = open_engine(path, "ctranslate2")

    def answer(texts: list[str]) -> list[Answer]:
        translations = opened.translate(texts, **options)
        return [{"text": terminal.one_line(text), "score": None} for text in translations]

    encode = opened.tokenizer("source").encode
    check = text_check(lambda texts: [encode(text) for text in texts], opened.config, options["truncate"])
    return text_answerer(answer, "translation", check), opened.config.max_len


def classify(
    ctx: typer.Context,
    model: ModelPath,
    inputs: Annotated[
        list[str] | None,
        argument("TEXT_OR_IMAGE", "Given here (or a folder of images), with --file, or as lines piped in."),
    ] = None,
    second: Annotated[str | None, option("TEXT", "The second text of a pair; for a table, use --column A,B.")] = None,
    file: RecordsFile = None,
    column: Column = None,
    out: Out = None,
    stream: Stream = False,
    encoding: Encoding = "auto",
    top: Annotated[int, typer.Option(min=1, metavar="N", help="Classes to show, likeliest first.")] = 1,
    probabilities: Annotated[bool, flag("--probabilities", "Add a column p_CLASS to a table for every class.")] = False,
    threshold: Annotated[
        float | None, typer.Option(metavar="P", min=0, max=1, help="No label below this probability.")
    ] = None,
    classes: Annotated[
        str | None, option("NAMES", "For two-tower models such as CLIP: the class names, separated by commas.")
    ] = None,
    template: Annotated[list[str] | None, option("TEXT", "Text for a class, with {} for its name; repeatable.")] = None,
    truncate: Truncate = False,
    engine: ModelEngine = "torch",
    on: On = "local",
    jobs: Jobs = None,
    device: Device = "auto",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Classify each text or image; a table gets the new columns predicted_label and probability.

    Other models give all labels that apply, a number, or a tag for every word. A blank line gets a blank answer.
    """
    if inputs and not all(text.strip() for text in inputs):
        raise UsageError("a text to classify is empty")
    if second is not None:
        if len(inputs or ()) != 1:
            raise UsageError("--second needs exactly one text; for pairs in a table, use --file F --column A,B")
        inputs = [f"{text}\t{second}" for text in inputs or ()]
    check_files(ctx)
    from regard.generation.label_answers import label_answerer
    from regard.generation.text_generation import check_can_classify

    opened = terminal.open_model(model, device, engine, dtype)
    if template is not None and classes is None:
        raise UsageError("--template needs --classes NAMES, the classes to insert into it")
    if classes is not None:
        from regard.generation.zero_shot import TEMPLATE, zero_shot

        with terminal.usage_errors("classes", "template"):
            opened = zero_shot(opened, classes.split(","), template or TEMPLATE)
    if opened.config.head != "tag":
        check_can_classify(opened)
    terminal.check_inputs(opened, inputs or ())
    images = opened.config.source == "image"
    records = terminal.read_records(inputs, file, column, encoding, stream=stream, images=images)
    has_pairs = second is not None or (records is not None and records.has_pairs)
    options: dict[str, Any] = {"top": top, "probabilities": probabilities, "has_pairs": has_pairs}
    with terminal.usage_errors("top", "probabilities", "threshold"):
        answerer = label_answerer(opened, truncate=truncate, threshold=threshold, **options)
    settings = {"engine": engine, "dtype": dtype, "truncate": truncate, "threshold": threshold, "classes": classes}
    settings |= without_none(template=template)
    predict(ctx, model, opened.config.max_len, answerer, records, out, as_json, settings)


def caption(
    ctx: typer.Context,
    model: ModelPath,
    images: Annotated[list[str] | None, argument("IMAGE", "Image files, or a folder of them.")] = None,
    file: RecordsFile = None,
    column: Column = None,
    out: Out = None,
    stream: Stream = False,
    encoding: Encoding = "auto",
    beam: Beam = None,
    length_penalty: LengthPenalty = None,
    max_new_tokens: NewTokens = None,
    engine: ModelEngine = "torch",
    on: On = "local",
    jobs: Jobs = None,
    device: Device = "auto",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Caption each image file, one line each; with several files, each line begins with the file's name."""
    options = terminal.check_generation(beam=beam, length_penalty=length_penalty, max_new_tokens=max_new_tokens)
    from regard.generation import bulk_prediction
    from regard.generation import caption as run
    from regard.generation.text_generation import check_can_caption

    if not images and file is None and not stream:
        raise UsageError("there is nothing to caption: give image files, a folder, or --file TABLE")
    check_files(ctx)
    opened = terminal.open_model(model, device, engine, dtype)
    check_can_caption(opened)
    terminal.check_inputs(opened, images or ())
    records = terminal.read_records(images, file, column, encoding, stream=stream, images=True)
    several = records is not None and records.form == "lines" and len(list(records.read())) > 1

    def answer(names: list[str]) -> list[Answer]:
        answers = [answer_to_dict(texts) for texts in run(opened, names, **options).n_best]
        return [{**answer, "image": name} for name, answer in zip(names, answers, strict=True)]

    def line(answer: Answer) -> str:
        text = terminal.one_line(answer["text"])
        return f"{answer['image']}\t{text}" if several and out is None else text

    answerer = text_answerer(answer, "caption", bulk_prediction.image_check, line=line)
    settings = {"engine": engine, "dtype": dtype, **options}
    predict(ctx, model, opened.config.max_len, answerer, records, out, as_json, settings)
