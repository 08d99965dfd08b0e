"""Retrieval and Fusion-in-Decoder on questions about sentences of the embedded grammar, on a CPU in some minutes.

    python benchmarks/fid.py OUT [--steps 1200] [--seed 0]

Facts are simple sentences of en-ko ("The nurse pushed the window."). Each has two questions, "Who pushed the window?"
and "The nurse pushed what?", unless another fact answers the same question. An embedder learns from pairs of question
and fact; all facts are indexed and retrieved; a reader learns to answer from five facts. Both are evaluated on facts
that neither learned from, with the first 1, 5 and 20 results. Prints a line for each, and writes OUT/fid-SEED.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import regard
from regard.data.corpora.enko import EnKo, realise
from regard.generation.passage_index import PassageIndex, build_index
from regard.recipes import run_config
from regard.training.metrics.retrieval_metrics import answer_exactness

SMALL = ("model.d_model=128", "model.n_heads=4", "model.d_ff=256", "train.device=cpu", "train.samples=0")
_PLAIN = {"noun", "det", "title"}  # of a noun phrase without adjectives, owners and clauses


def make_facts(n: int) -> list[tuple[str, list[tuple[str, str]]]]:
    """Different sentences, each with the questions that it alone answers, and their answers."""
    found: dict[str, list[tuple[str, str]]] = {}
    n_facts_of: dict[str, int] = {}
    for index in range(60 * n):
        if len(found) == n:
            break
        for sentence, pairs in _fact(EnKo().example("train", index).structure):
            if sentence not in found:
                found[sentence] = pairs
                for question, _ in pairs:
                    n_facts_of[question] = n_facts_of.get(question, 0) + 1
    return [(text, [pair for pair in pairs if n_facts_of[pair[0]] == 1]) for text, pairs in found.items()]


def _fact(structure: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """A sentence that only says who did what, and what can be asked about it."""
    clause = structure["clause"]
    subject, thing = clause.get("subject"), clause.get("object")
    simple = set(clause) <= {"predicate", "subject", "object", "tense", "place", "time", "manner"}
    if "join" in structure or "question" in structure or not simple or subject is None or thing is None:
        return
    if not all(set(x) <= _PLAIN and x["noun"][0].islower() for x in (subject, thing)):
        return
    words = realise(structure).source.split()[1:]  # without the tag of the register
    text = " ".join(words)

    def phrase(node: dict[str, Any]) -> str:
        return " ".join([*([node["det"]] if "det" in node else []), node["noun"]])

    who, what = phrase(subject), phrase(thing)
    if not text.lower().startswith(f"{who} ") or f" {what}" not in text:
        return
    rest = text[len(who) + 1 :].rstrip(".")
    before, _, after = text.rstrip(".").partition(f" {what}")
    yield text, [(f"who {rest}?", who), (f"{before} what{after}?", what)]


def train(task: str, out: Path, *words: str) -> Path:
    """The run in ``out``, trained unless it exists."""
    if not (out / "model").is_dir():
        regard.train(run_config(task, [f"train.out={out}", *SMALL, *words]), style="quiet")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--facts", type=int, default=4000)
    parser.add_argument("--asked", type=int, default=300, help="questions at the end")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    seed = f"train.seed={args.seed}"
    known = make_facts(args.facts)
    n_held_out = len(known) // 10
    learned, held_out = known[n_held_out:], known[:n_held_out]
    (out / "facts.txt").write_text("".join(f"{text}\n" for text, _ in known), encoding="utf-8")
    pairs = [f"{question}\t{text}\n" for text, pairs in learned for question, _ in pairs]
    (out / "pairs.tsv").write_text("".join(pairs), encoding="utf-8")
    words = ["data.tokenizer=words", "data.max_len=24", "model.max_len=24", "data.kind=pairs", "train.batch_size=64"]
    words += [seed, f"data={out / 'pairs.tsv'}", f"train.steps={args.steps // 2}"]
    embedder = train("embed", out / f"embed-{args.seed}", *words)
    index_folder = out / f"index-{args.seed}"
    if not index_folder.exists():
        rows = "".join(json.dumps({"text": text}) + "\n" for text, _ in known)
        (out / "facts.jsonl").write_text(rows, encoding="utf-8")
        build_index([out / "facts.jsonl"], index_folder, model=str(embedder))
    index = PassageIndex.open(index_folder)

    def retrieve(rows: list[tuple[str, list[tuple[str, str]]]], n: int) -> list[dict[str, Any]]:
        """Every question about these facts, with the n passages found for it."""
        triples = [(question, answer, text) for text, pairs in rows for question, answer in pairs]
        found = index.search([question for question, _, _ in triples], n, model=embedder)
        keys = ("question", "answer", "right", "passages")
        return [
            dict(zip(keys, (*x, [p.text for p in near]), strict=True)) for x, near in zip(triples, found, strict=True)
        ]

    questions = out / f"questions-{args.seed}.jsonl"
    if not questions.exists():
        rows = [{**x, "passages": x["passages"][:5]} for x in retrieve(learned, 5) if x["right"] in x["passages"][:5]]
        questions.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = ["data.tokenizer=words", "data.max_len=48", "data.max_target_len=8", "model.max_len=48", seed]
    words += [f"train.steps={args.steps}", "train.eval_every=0", "train.save_every=0", "train.batch_tokens=4096"]
    reader = regard.load(train("answer", out / f"answer-{args.seed}", f"data={questions}", *words))
    questions_asked = retrieve(held_out, 20)[: args.asked]
    results = []
    for n in (1, 5, 20):
        read = [x["passages"][:n] for x in questions_asked]
        answers = regard.answer(reader, [x["question"] for x in questions_asked], read, max_new_tokens=6)
        exact = answer_exactness([x.text for x in answers], [x["answer"] for x in questions_asked])
        is_found = [x["right"] in x["passages"][:n] for x in questions_asked]
        is_attended = [x.passages[x.source].text == a["right"] for x, a in zip(answers, questions_asked, strict=True)]
        among = [s for s, t in zip(is_attended, is_found, strict=True) if t]
        right = [s for s, e, t in zip(is_attended, exact, is_found, strict=True) if t and e]
        results.append(
            {
                "passages": n,
                "recall": sum(is_found) / len(is_found),
                "exact": float(exact.mean()),
                "most_attended_is_right": sum(among) / max(len(among), 1),
                "of_right_answers": sum(right) / max(len(right), 1),
            }
        )
        print(json.dumps(results[-1]), flush=True)
    document = {"seed": args.seed, "facts": len(known), "asked": len(questions_asked), "results": results}
    (out / f"fid-{args.seed}.json").write_text(json.dumps(document, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
