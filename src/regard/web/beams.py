"""A beam search as a tree: all texts it followed, joined where they begin alike, each token with the search's score."""

from __future__ import annotations

from typing import Any

from ..generation.generate import Generated
from ..lens.labels import token_labels, token_text
from .limits import Limits, Refused
from .sessions import Session


class Tree:
    """Nodes with their parents; ``score`` is Σ log P of the tokens so far.

    ``kept`` are those of the texts the search ended with, of which one is ``best``; of each such text the last node has
    its ``rank`` and ``final``, its score by length. The others were given up on the way; ``ended`` says that a text
    that was given up was a whole one.
    """

    def __init__(self, session: Session) -> None:
        self._served = session.served
        self.nodes: list[dict[str, Any]] = [
            {"id": 0, "parent": None, "text": "", "score": 0.0, "best": True, "kept": True}
        ]
        self._tokens = [-1]  # of each node
        self._below: dict[tuple[int, int], int] = {}  # (node, token) → the node it leads to

    def grow(self, parent: int, token: int, score: float) -> int:
        """The node that a token leads to."""
        if (parent, token) not in self._below:
            self._below[parent, token] = node = len(self.nodes)
            text = token_text(token, self._served.writes_with, self._served.config)
            plain = {"text": text, "score": score, "best": False, "kept": False}
            self.nodes.append({"id": node, "parent": parent, **plain})
            self._tokens.append(token)
        return self._below[parent, token]

    def follow(self, made: Generated) -> None:
        """Step by step, as the search went: a beam goes on from one before it."""
        at: dict[int, int] = {}  # beam → its node
        for step in made.steps or ():
            kept = list(step.of(0))
            nodes = [self.grow(at.get(parent, 0), token, score) for _, parent, token, score in kept]
            for node, (beam, *_) in zip(nodes, kept, strict=True):
                if beam is None:
                    self.nodes[node]["ended"] = True
            at = {beam: node for node, (beam, *_) in zip(nodes, kept, strict=True) if beam is not None}

    def mark(self, made: Generated) -> None:
        """The texts that the search ended with."""
        for rank, found in enumerate(made.hypotheses[0]):
            node = 0
            for token in found.tokens:
                node = self._below[node, token]
                self.nodes[node] |= {"kept": True, "best": self.nodes[node]["best"] or rank == 0}
            self.nodes[node] |= {"final": found.score, "rank": rank}

    def name(self, nodes: list[dict[str, Any]]) -> None:
        """Give each node the ``label`` of its token within a text: a part of a character is called after the whole."""
        inner = {node["parent"] for node in nodes}
        leaves = [node for node in nodes if node["id"] not in inner]
        for leaf in sorted(leaves, key=lambda node: node.get("rank", len(nodes))):
            path = [leaf]
            while path[-1]["parent"]:
                path.append(self.nodes[path[-1]["parent"]])
            tokens = [self._tokens[node["id"]] for node in reversed(path)]
            labels = token_labels(tokens, self._served.writes_with, self._served.config)
            for node, label in zip(reversed(path), labels, strict=True):
                node.setdefault("label", label.text)
        self.nodes[0]["label"] = ""


def tree(session: Session, limits: Limits) -> dict[str, Any]:
    """All nodes, parents before children; where there are too many, without those that were given up."""
    made = session.search
    if made is None:
        raise Refused(422, "this look was not written by a beam search; generate with beam=2 or more")
    found = Tree(session)
    found.follow(made)
    found.mark(made)
    nodes = found.nodes
    if len(nodes) > limits.beam_nodes:
        nodes = [node for node in nodes if node["kept"]]
    found.name(nodes)
    return {"nodes": nodes, "left_out": len(found.nodes) - len(nodes)}
