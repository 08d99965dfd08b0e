"""Examples at the end of each command's help. A test types each of them."""

from __future__ import annotations

import typer

# By the command's name: (what is typed, what for). `regard` is the program itself.
EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "regard": (
        ("regard demo", "everything once, in three minutes: train, test, look inside, ship, explore"),
        ("regard train translate", "English → Korean from an embedded grammar; no download"),
        ("regard doctor", "what is installed here, and what the rest would add"),
        ("regard --install-completion", "let the shell complete commands, fields and runs"),
    ),
    "demo": (
        ("regard demo", "train, test, look inside, export, explore; again: goes on where it stopped"),
        ("regard demo --no-serve --lang ko", "without the explorer, in Korean"),
        ("regard demo --out /tmp/small train.steps=100", "a short one, which learns little"),
    ),
    "doctor": (
        ("regard doctor", "versions, devices, what is missing and what to type"),
        ("regard doctor --json", "the same for a bug report or a script"),
    ),
    "train": (
        ("regard train translate", "the embedded grammar: nothing to download"),
        ("regard train classify data.source=reviews.csv model.n_layers=4", "a file of your own"),
        ("regard train lm data.source=book.txt data.tokenizer=chars train.steps=500", "a book, letter by letter"),
        ("regard train --preset shakespeare data.source=shakespeare.txt", "by a recipe; --list shows all"),
        ("regard train lm --config run.yaml train.steps=5", "fields from a file; words override it"),
        ("regard train --resume runs/lm train.steps=2000", "go on where a run stopped, and further"),
    ),
    "eval": (
        ("regard eval runs/demo/run", "on the data the run held out"),
        ("regard eval runs/demo/run --split all --out report", "every held-out set; outputs and worst cases"),
        ("regard eval runs/b --against runs/a", "the difference, with its confidence interval"),
        ("regard eval runs/a data.source=test.tsv --beam 5", "on a file"),
    ),
    "generate": (
        ('regard generate runs/lm "ROMEO:"', "what follows, as it is written"),
        ('regard generate runs/lm "import " --temperature 0.8 --top-p 0.9 --seed 1', "drawn, and repeatable"),
        ("regard generate runs/lm --file prompts.txt --lines --json", "a prompt a line, as JSON"),
    ),
    "translate": (
        ('regard translate runs/demo/run "[polite] The teacher read a book."', "one sentence"),
        ("regard translate runs/demo/run --file in.txt --out out.txt", "a file, line by line"),
        ('regard translate shipped "[plain] It is cold." --engine onnx', "with an exported model"),
    ),
    "classify": (
        ('regard classify runs/reviews "What a wonderful film."', "the class and its probability"),
        ("regard classify runs/digits 7.png 3.png --top 3", "images; the three likeliest"),
        ("regard classify runs/reviews --file reviews.txt --json", "a text a line, as JSON"),
    ),
    "caption": (
        ("regard caption runs/shapes photo.png", "what is to be seen"),
        ("regard caption runs/shapes a.png b.png --beam 3 --json", "several, with scores"),
    ),
    "look": (
        ('regard look runs/demo/run "[polite] The teacher read a book." --words', "in the terminal"),
        ('regard look runs/demo/run "[plain] It is cold." --out look.html', "a page; .png, .svg, .pdf, .csv too"),
        ('regard look models/gpt2 "The cat sat" --layer 5 --head 1 --top 3', "where one head looks, in words"),
        ("regard look runs/demo/run --score", "how far attention is to be believed, as a number"),
    ),
    "export": (
        ("regard export runs/demo/run onnx shipped", "ONNX, compared with the model"),
        ("regard export runs/demo/run int8,ctranslate2 small --check pairs.tsv", "int8, with its BLEU on a file"),
    ),
    "serve": (
        ("regard serve runs/demo/run", "the explorer, on this machine only"),
        ("regard serve runs/a runs/b --port 0 --no-open", "two models side by side, on any free port"),
    ),
    "data describe": (
        ("regard data describe pairs.tsv", "counts, lengths, repeats, leaks, bad lines"),
        ("regard data describe en-ko --examples 10", "what an embedded corpus looks like"),
        ("regard data describe reviews.csv data.columns=text,label data.bad_lines=skip", "columns by name"),
    ),
    "info": (
        ("regard info runs/demo/run", "what a run's model is"),
        ("regard info models/gpt2 --json", "a directory of Hugging Face, as JSON"),
    ),
    "bench attention": (
        ("regard bench attention --lengths 512,1024,2048", "time and memory of each mechanism"),
        ("regard bench attention --backward --mechanisms sdpa,window --json", "some of them, forward and backward"),
    ),
    "bench generate": (
        ("regard bench generate gpt2 --batch 1,8 --weights fp32,int8", "a preset with random weights"),
        ("regard bench generate runs/demo/run --beam 1,4", "a run"),
    ),
    "cost": (
        ("regard cost gpt2 --batch 8 --length 1024 --training", "parameters, operations, memory, part by part"),
        ("regard cost mistral-7b --length 8192 --cache int8 --device rtx4090", "the cache, and a device's least time"),
        ("regard cost llama-7b model.n_kv_heads=8 --compare llama-7b", "with grouped queries, and without"),
    ),
    "ablate": (
        ("regard ablate --list", "which experiments there are"),
        ("regard ablate heads --seeds 3", "the number of heads, three seeds each, with significance"),
        ("regard ablate grid.toml --out runs/grid train.steps=500", "a grid of your own; again: goes on"),
    ),
}


def epilog(name: str) -> str | None:
    """The examples of a command as they stand at the end of its help; None where there are none."""
    if name not in EXAMPLES:
        return None
    lines = ["[bold]Examples[/bold]"]
    for typed, what_for in EXAMPLES[name]:
        lines += [f"[dim]# {_plain(what_for)}[/dim]", _plain(typed)]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Square brackets are markup in a help text."""
    return text.replace("[", r"\[")


def add_examples(app: typer.Typer, path: str = "") -> None:
    """Give every command of the program its examples."""
    for command in app.registered_commands:
        name = f"{path} {command.name}".strip()
        command.epilog = epilog(name) or command.epilog
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_examples(group.typer_instance, f"{path} {group.name}".strip())
