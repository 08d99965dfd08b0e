"""`regard ablate`, `bench` and `cost`: experiments, measurements, and the cost of a model before it is built."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.errors import UsageError
from regard.foundation.files import write_atomic
from regard.foundation.language import localise

from . import completion, terminal
from .options import AsJson, Device, On, Words, argument, flag, option
from .terminal import split_commas


def ablate(
    what: Annotated[
        str | None,
        argument(
            "NAME",
            "heads, d_k, d_ff, depth, size, dropout, positions, norm, residual, attention, mask, label-smoothing, "
            "warmup, mechanisms, extrapolation, paper, scaling; a grid as a TOML file; or the directory of a sweep to "
            "resume.",
        ),
    ] = None,
    words: Words = None,
    seeds: Annotated[int | None, option(None, "Seeds per cell.", least=1, default="3")] = None,
    jobs: Annotated[int | None, option(None, "Parallel runs.", least=1, default="one per core; 4 on a GPU")] = None,
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Directory of the sweep.", show_default="runs/ablate-NAME")
    ] = None,
    test: Annotated[
        str | None, option("SOURCE", "Evaluate every model on these examples too: test.en,test.de.")
    ] = None,
    minutes: Annotated[
        float | None, option(None, "Stop after this many minutes; run it again to continue.", least=0)
    ] = None,
    max_seconds: Annotated[float | None, option(None, "A run that takes longer counts as failed.", least=0)] = None,
    keep: Annotated[bool, flag("--keep", "Keep the weights of finished runs.")] = False,
    on: On = "local",
    report_only: Annotated[bool, flag("--report-only", "Run nothing; report the finished runs.")] = False,
    list_names: Annotated[bool, flag("--list", "Show the ablations and what they change, and exit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run an ablation: every cell with several seeds on the same batches, as in the paper's table 3.

    Finished runs are never repeated: after Ctrl-C or a crash, run the same command to continue. The exit code is 1 if a
    run failed; one that diverged counts as a result.
    """
    if list_names:
        _print_ablations(as_json)
        return
    if what is None:
        raise UsageError("name an ablation first: regard ablate NAME; regard ablate --list shows all")
    if what == "scaling":
        from regard.experiments.ablations import measure_scaling

        if words:
            raise UsageError(f"scaling trains no model: leave out {words[0]}")
        terminal.print_result(measure_scaling(out=out or Path("runs/ablate-scaling")), as_json)
        return
    from regard.experiments import ablate as run

    options: dict[str, Any] = {"seeds": seeds, "jobs": jobs, "minutes": minutes, "max_seconds": max_seconds}
    options |= {"out": out, "keep": keep, "report_only": report_only, "on": on}
    tests = None if test is None else {"test": test}
    result = run(what, words or (), tests=tests, **options, progress=terminal.progress)
    terminal.print_result(result, as_json)
    if any(row.n_failed for row in result.rows):
        raise typer.Exit(1)


def _print_ablations(as_json: bool) -> None:
    from regard.experiments.ablations import list_ablations

    ablations = list_ablations()
    if as_json:
        terminal.print_json({"ablations": ablations})
        return
    for name, entry in ablations.items():
        print(localise(f"{name}: {entry['about']}"))
        if entry["cells"]:
            print(f"    {', '.join(entry['cells'])}")


bench_app = typer.Typer(
    help="Measure: attention against length, generation by batch and beam, a training step, a server under load.",
    no_args_is_help=True,
)


def _parse_names(text: str, option: str, known: Sequence[str]) -> list[Any]:
    """`fp32,int8` → [fp32, int8]; at least one of the known names."""
    names = split_commas(text)
    for name in names or [""]:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(known)}", param_hint=option)
    return names


def _parse_numbers(text: str, option: str) -> list[int]:
    """`512,1024` → [512, 1024]."""
    words = split_commas(text)
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise typer.BadParameter(f"{text!r} is not a comma-separated list of positive whole numbers", param_hint=option)
    return [int(word) for word in words]


def _parse_words(words: list[str] | None, command: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of a model and of its training that overrides set; values that are wrong in any run are refused."""
    from regard.config import ModelConfig, TrainConfig
    from regard.config.overrides import PRESET, build_section, parse_overrides

    fields = parse_overrides(words or [], sections={"model": ModelConfig, "train": TrainConfig})
    model, train = fields.get("model", {}), fields.get("train", {})
    if PRESET in model:
        raise UsageError(f"model={model[PRESET]}: name the model first, {command} {model[PRESET]}")
    build_section("train", TrainConfig, train)
    return model, train


@bench_app.command("attention")
def attention(
    lengths: Annotated[
        str, typer.Option(metavar="N,…", help="Sequence lengths to measure, separated by commas.")
    ] = "512,1024,2048,4096,8192",
    mechanisms: Annotated[
        str | None, option("NAME,…", "Mechanisms to measure, separated by commas; all of them unless given.")
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="Number of heads.")] = 8,
    width: Annotated[int, typer.Option(min=1, help="Width of one head.")] = 64,
    causal: Annotated[bool, flag("--causal/--no-causal", "Use a causal mask.")] = True,
    backward: Annotated[bool, flag("--backward/--forward", "Measure forward and backward, or forward alone.")] = False,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the table and the PNG.")] = Path(
        "runs/bench-attention"
    ),
    as_json: AsJson = False,
) -> None:
    """Time and memory of every attention mechanism against length, with the fitted exponent of each."""
    numbers = _parse_numbers(lengths, "--lengths")
    from regard.experiments.bench_attention import bench_attention as measure
    from regard.experiments.bench_attention import choose_contenders

    names = None if mechanisms is None else split_commas(mechanisms)
    try:
        choose_contenders(names)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--mechanisms") from None
    if names == []:
        raise typer.BadParameter("names no mechanism", param_hint="--mechanisms")
    options: dict[str, Any] = {"mechanisms": names, "n_heads": heads, "d_head": width, "causal": causal, "out": out}
    result = measure(lengths=numbers, backward=backward, **options, progress=terminal.progress)
    terminal.print_result(result, as_json)


@bench_app.command("generate")
def generate(
    model: Annotated[
        str,
        argument("MODEL", "A run, a model directory, or a preset with random weights.", completion.presets_or_models),
    ],
    batch: Annotated[str, typer.Option(metavar="N,…", help="Batch sizes, separated by commas.")] = "1,8",
    beam: Annotated[str, typer.Option(metavar="K,…", help="Beam widths, separated by commas; 1 is greedy.")] = "1,4",
    weights: Annotated[
        str, typer.Option(metavar="TYPE,…", help="fp32, bf16 or int8, separated by commas.")
    ] = "fp32,int8",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt or a source.")] = 16,
    new: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 64,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure generation: time to the first token, time of each further token, tokens per second."""
    batches, beams = _parse_numbers(batch, "--batch"), _parse_numbers(beam, "--beam")
    from regard import PRESETS, build
    from regard.experiments.bench_generate import WEIGHTS, bench_generate

    kinds = _parse_names(weights, "--weights", WEIGHTS)
    is_preset = model in PRESETS and not Path(model).exists()
    opened = build(model, device=terminal.device_name(device)) if is_preset else terminal.open_model(model, device)
    options: dict[str, Any] = {"batches": batches, "beams": beams, "weights": kinds, "n_prompt": prompt, "n_new": new}
    terminal.print_result(bench_generate(opened.eval(), model, **options, progress=terminal.progress), as_json)


@bench_app.command("train")
def bench_training(
    model: Annotated[
        str, argument("MODEL", "A preset of a decoder or an encoder-decoder.", completion.presets_or_models)
    ],
    words: Words = None,
    batch: Annotated[int, typer.Option(min=1, help="Texts per step.")] = 8,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a text, and of its source.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Steps whose median is taken.")] = 10,
    peers: Annotated[str, typer.Option(metavar="NAME,…", help="regard, torch, transformers, separated by commas.")] = (
        "regard,torch,transformers"
    ),
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure a training step, compared with plain torch and transformers.

    Fields change the model (model.n_layers=4), the precision (train.precision=bf16) and compilation (train.compile=on).
    """
    from regard.config import TrainConfig
    from regard.experiments.bench_train import CONTENDERS, bench_train
    from regard.experiments.cost import resolve_model

    contenders = _parse_names(peers, "--peers", CONTENDERS)
    model_fields, train_fields = _parse_words(words, "regard bench train")
    recipe = TrainConfig(**train_fields)
    options: dict[str, Any] = {"batch": batch, "length": length, "steps": steps, "contenders": contenders}
    options |= {"compile": None if recipe.compile == "auto" else recipe.compile == "on", "precision": recipe.precision}
    with terminal.usage_errors("length"):
        _, config, _ = resolve_model(model, model_fields)
        device = terminal.device_name(device)
        result = bench_train(config, model, **options, device=device, progress=terminal.progress)
    terminal.print_result(result, as_json)


@bench_app.command("serve")
def bench_server(
    target: Annotated[str, argument("URL_OR_RUN", "A server, or a run or directory to serve.", completion.models)],
    clients: Annotated[
        str, typer.Option(metavar="N,…", help="Numbers of concurrent clients, separated by commas.")
    ] = "1,8,32",
    requests: Annotated[int, typer.Option(min=1, help="Requests for each number of clients.")] = 64,
    prompts: Annotated[Path | None, option("FILE", "A prompt or source on each line.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Maximum number of tokens per response.")] = 32,
    beams: Annotated[
        int | None, option("K", "Search with beams at /v1/translate; otherwise texts are streamed.", least=1)
    ] = None,
    model: Annotated[str | None, option("NAME", "Which of the server's models.", default="the first")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="REGARD_API_KEY", metavar="KEY", help="API key of the server.", show_default=False),
    ] = None,
    out: Annotated[Path | None, option("FILE", "Also write the results to this file, as JSON.")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure a server under load: requests and tokens per second, time to the first and to the last token, errors.

    The exit code is 1 if a request failed.
    """
    counts = _parse_numbers(clients, "--clients")
    terminal.check_out(out)
    from regard.experiments.bench_serve import PROMPTS, bench_serve, client_processes, start_server

    lines = PROMPTS if prompts is None else [line for line in terminal.read_text(prompts).splitlines() if line.strip()]
    if not lines:
        raise UsageError(f"--prompts {prompts} has no prompts")
    options: dict[str, Any] = {"clients": counts, "requests": requests, "prompts": lines, "max_tokens": max_tokens}
    options |= {"beams": beams, "model": model, "api_key": api_key, "progress": terminal.progress}
    is_url = target.startswith(("http://", "https://"))
    with nullcontext(target) if is_url else start_server(target, device) as url:
        result = bench_serve(url, **options, processes=client_processes())
    if out is not None:
        write_atomic(out, json.dumps(result.to_dict(), indent=2).encode())
    terminal.print_result(result, as_json)
    if any(case.errors for case in result.results):
        raise typer.Exit(1)


def cost(
    config: Annotated[str, argument("MODEL", "A model preset, a run, or a model directory.")],
    words: Words = None,
    batch: Annotated[int, typer.Option(help="Texts or images per batch.")] = 1,
    length: Annotated[
        int | None, option(None, "Tokens of the text, or of the target if there is a source.", default="max_len")
    ] = None,
    source_length: Annotated[int | None, option(None, "Tokens of the source.", default="as length")] = None,
    training: Annotated[bool, flag("--training", "Also show memory and time of a training step.")] = False,
    compare: Annotated[str | None, option("OTHER", "Another preset, run or directory to compare with.")] = None,
    device: Annotated[
        str, typer.Option(help="Device with its speed and memory: h200, a100, rtx4090, … or cpu (measured).")
    ] = "h200",
    cache: Annotated[str, typer.Option(metavar="TYPE", help="Type of the KV cache: fp32, bf16 or int8.")] = "bf16",
    plot: Annotated[Path | None, option("FILE", "Draw it: .png, .svg or .pdf.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict what a model costs: parameters, operations, memory, cache, and the least time a device needs.

    Fields change the model (model.n_layers=4) and how it is trained (train.optimiser=muon train.checkpointing=true).
    """
    model_fields, train_fields = _parse_words(words, "regard cost")
    from regard.experiments.cost import cost as compute_cost
    from regard.experiments.cost import resolve_model
    from regard.experiments.cost_report import CostComparison, check_plot

    if plot is not None:
        check_plot(plot)

    setting: dict[str, Any] = {"batch": batch, "length": length, "source_length": source_length}
    setting |= {"device": device, "cache": cache}

    def cost_of(name: str, fields: dict[str, Any]) -> Any:
        recipe = resolve_model(name, fields)[2]
        return compute_cost(name, train=recipe.with_(**train_fields), **setting, **fields)

    with terminal.usage_errors("batch", "length", "source_length", "device", "cache"):
        first = cost_of(config, model_fields)
        result = first if compare is None else CostComparison(first, cost_of(compare, {}))
    if plot is not None:
        terminal.progress(f"wrote {first.draw(plot)}")
    terminal.print_either(result.to_dict(), result.to_text(training), as_json)
