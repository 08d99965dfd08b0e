"""Translate with the directory that `regard export RUN onnx shipped` wrote, without regard: greedy, with the KV cache.

pip install numpy onnxruntime tokenizers
python translate.py shipped "The teacher read a book."
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

root, text = Path(sys.argv[1]), sys.argv[2]
about = json.loads((root / "onnx" / "onnx.json").read_text(encoding="utf-8"))  # tokens, lengths, every input and output
inputs, bos, eos = about["graphs"]["decoder"]["inputs"], about["tokens"]["bos"], about["tokens"]["eos"]


def open_tokenizer(side):
    own = root / f"tokenizer.{side}.json"  # where source and target do not share one
    return Tokenizer.from_file(str(own if own.exists() else root / "tokenizer.json"))


def run(session, feed):
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feed), strict=True))


encoder, decoder = (onnxruntime.InferenceSession(root / "onnx" / f"{name}.onnx") for name in ("encoder", "decoder"))
source = np.array([open_tokenizer("source").encode(text).ids])  # (1, S)
keep = np.ones(source.shape, dtype=bool)  # True for real tokens, False for padding
memory = run(encoder, {"source": source, "keep": keep})  # cross_k_0, cross_v_0, … of each layer
shapes = {name: about["shape"] for name, about in inputs.items() if name.startswith(("past_k", "past_v"))}
past = {name: np.zeros((1, heads, 0, width), np.float32) for name, (_, heads, _, width) in shapes.items()}
tokens = [bos]
while len(tokens) < about["longest"]["target"]:
    at = np.arange(len(tokens))[None]  # positions of all tokens; only the last one is new
    new = {"tokens": np.array([tokens[-1:]]), "positions": at[:, -1:], "past_positions": at[:, :-1]}
    out = run(decoder, {**new, **past, **memory, "keep": keep, "wanted": np.array([0])})
    if (token := int(out["logits"][0, 0].argmax())) == eos:
        break
    tokens.append(token)
    past = {name: out[name.replace("past", "present")] for name in past}
print(open_tokenizer("target").decode(tokens[1:]))
