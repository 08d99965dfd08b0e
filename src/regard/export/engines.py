"""One exported directory, four engines with one interface: torch, ONNX Runtime, CTranslate2, llama.cpp.

    engine = open_engine(path, "ctranslate2")
    engine.translate(["The cat sleeps."], beam=4)        texts in, texts out
    engine.write([[5, 9, 2]], GenerateConfig(beam=4))    token ids in, token ids out

Inputs are checked, limited and batched here, in the same way for all engines.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from .. import hub
from ..config import ModelConfig
from ..errors import BadModelFile
from ..generation import GenerateConfig, generate
from ..generation.prompts import add_bos, default_output_length, pad_prompts, source_tensors
from ..generation.stop_conditions import decode_after
from ..generation.text_codec import split_special_tokens
from ..hub.gguf_file import NAME as GGUF_FILE
from ..models import Model
from ..text import read_processor
from .ctranslate2_export import FOLDER as CT2_FOLDER
from .ctranslate2_export import require_ctranslate2, vocabularies
from .quantise import is_quantised, open_int8

EngineName = Literal["torch", "onnx", "ctranslate2", "gguf"]
Side = Literal["source", "target"]
ONNX_FOLDER = "onnx"
_PLACES: dict[EngineName, str] = {"onnx": ONNX_FOLDER, "ctranslate2": CT2_FOLDER, "gguf": GGUF_FILE}
_CT2_FIELDS = {"max_new_tokens", "min_new_tokens", "beam", "length_penalty", "penalty_form", "early_stopping"}
_CT2_FIELDS |= {"truncate", "cache"}  # the fields of GenerateConfig that CTranslate2 supports
_LLAMA_CPP_CONTEXT = 4096  # tokens of a text in llama.cpp at most: the logits of each are kept


class Engine(ABC):
    """Writes texts; a subclass defines how rows of ids become rows of ids."""

    name: EngineName
    early_stopping = False  # what ``translate`` and ``generate`` do unless told

    def __init__(self, config: ModelConfig, processor: Any) -> None:
        self.config, self.processor = config, processor

    @abstractmethod
    def _write(self, rows: list[list[int]], config: GenerateConfig) -> list[list[int]]:
        """The best text for each checked source or prompt, without the end token."""

    def write(
        self, rows: Sequence[Sequence[int]], config: GenerateConfig | None = None, **fields: Any
    ) -> list[list[int]]:
        """New tokens for each row of token ids, a source or a prompt, without the end token."""
        config = (config or GenerateConfig()).with_(**fields)
        lists = [list(row) for row in rows]
        return self._write(self._check_rows(lists, config), config) if lists else []

    def token_logits(self, source: Tensor, target: Tensor | None = None, padding_mask: Tensor | None = None) -> Tensor:
        """Logits of every token, or of the classes; TypeError where the engine returns none."""
        raise TypeError(f"the {self.name} engine shows no logits")

    def translate(
        self,
        texts: Sequence[str],
        *,
        beam: int = 4,
        length_penalty: float = 1.0,
        penalty_form: Literal["hf", "gnmt"] = "hf",
        max_new_tokens: int | None = None,
        early_stopping: bool | Literal["never"] | None = None,
        truncate: bool = False,
        batch: int = 32,
    ) -> list[str]:
        """The translation of each text, ``batch`` of similar length at a time; of nothing, nothing.

        What is not given is as in ``regard.translate``, with one exception: CTranslate2's beam search knows
        early_stopping=True only, so that is its default there, and another value is refused.
        """
        if self.config.architecture not in ("encoder-decoder", "recurrent") or self.config.source != "text":
            kind = f"architecture={self.config.architecture!r}, source={self.config.source!r}"
            raise ValueError(f"{kind} translates nothing")
        penalty: dict[str, Any] = {"length_penalty": length_penalty, "penalty_form": penalty_form}
        stops = self.early_stopping if early_stopping is None else early_stopping
        config = GenerateConfig(beam=beam, early_stopping=stops, truncate=truncate, **penalty)
        return self._write_texts(texts, "source", config, max_new_tokens or None, batch)

    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int = 128,
        beam: int = 1,
        length_penalty: float = 1.0,
        truncate: bool = False,
        batch: int = 32,
    ) -> list[str]:
        """What follows each prompt, without the prompt."""
        if self.config.architecture != "decoder":
            raise ValueError(f"architecture={self.config.architecture!r} reads a source; translate is for it")
        options: dict[str, Any] = {"length_penalty": length_penalty, "early_stopping": self.early_stopping}
        config = GenerateConfig(beam=beam, truncate=truncate, **options)
        return self._write_texts(prompts, "target", config, max_new_tokens, batch)

    def _write_texts(
        self, texts: Sequence[str], side: Side, config: GenerateConfig, max_new_tokens: int | None, batch: int
    ) -> list[str]:
        """What follows each text, or translates it, in batches of similar length; ``side`` is that of the texts."""
        if isinstance(texts, str):
            raise TypeError("texts is one string; give a list of them")
        if batch < 1:
            raise ValueError(f"batch={batch} must be at least 1")
        decode, rows = self.tokenizer("target").decode, [self._encode(text, side) for text in texts]
        limits = [
            default_output_length(self.config, len(row)) if max_new_tokens is None else max_new_tokens for row in rows
        ]
        # An empty source gives an empty text: the runtimes do not agree on what follows the end token alone.
        order = [index for index, text in enumerate(texts) if side == "target" or text.strip()]
        order.sort(key=lambda index: len(rows[index]), reverse=True)
        out = [""] * len(rows)
        for limit, alike in itertools.groupby(order, key=limits.__getitem__):  # no limit depends on the company
            same = list(alike)
            for group in (same[start : start + batch] for start in range(0, len(same), batch)):
                written = self.write([rows[i] for i in group], config.with_(max_new_tokens=limit))
                for index, tokens in zip(group, written, strict=True):
                    out[index] = (decode_after(decode, rows[index]) if side == "target" else decode)(tokens)
        return out

    def _encode(self, text: str, side: Side) -> list[int]:
        """A source with its special tokens; a prompt without those that end a text."""
        if side == "source":
            return list(self.tokenizer(side).encode(text))
        first, ids, _ = split_special_tokens(self.tokenizer(side), text)
        return [*first, *ids]

    def _check_rows(self, rows: list[list[int]], config: GenerateConfig) -> list[list[int]]:
        """Rows checked and truncated as by ``generate``."""
        if self.config.architecture != "decoder":
            return [item.tolist() for item in source_tensors(rows, None, self.config, config.truncate)]
        prompts = add_bos(rows, self.config.bos_id, "prompt")
        return pad_prompts(prompts, self.config, config, torch.device("cpu")).rows

    def tokenizer(self, side: Side) -> Any:
        """The tokenizer of the source or target; of the other one where there is one for both."""
        processor = self.processor
        tokenizers = [] if processor is None else [processor.source, processor.target]
        found = [x for x in (tokenizers if side == "source" else reversed(tokenizers)) if x]
        if not found:
            raise ValueError("this model came without a tokenizer, so it reads token ids: use write")
        return found[0]


class TorchEngine(Engine):
    """The torch model, float or int8."""

    name: EngineName = "torch"

    def __init__(self, model: Model) -> None:
        super().__init__(model.config, model.processor)
        self.model = model

    def _write(self, rows: list[list[int]], config: GenerateConfig) -> list[list[int]]:
        return generate(self.model, rows, config).tokens

    @torch.no_grad()
    def token_logits(self, source: Tensor, target: Tensor | None = None, padding_mask: Tensor | None = None) -> Tensor:
        if target is not None:
            return self.model(source, target, source_padding_mask=padding_mask)
        return self.model(source) if padding_mask is None else self.model(source, padding_mask=padding_mask)


class Ct2Engine(Engine):
    """CTranslate2's runtime. ``compute_type`` "int8" quantises the weights as they are loaded.

    Its beam search is ours with early_stopping=True; other values of that field are refused.
    """

    name: EngineName = "ctranslate2"
    early_stopping = True

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        processor: Any,
        *,
        compute_type: str = "default",
        device: str = "cpu",
        threads: int | None = None,
    ) -> None:
        require_ctranslate2()
        import ctranslate2

        super().__init__(config, processor)
        if not (folder / "model.bin").is_file():
            raise BadModelFile(f"{folder} has no model.bin; export the model with the kind ctranslate2")
        self.reads_source = config.architecture == "encoder-decoder"
        kind = ctranslate2.Translator if self.reads_source else ctranslate2.Generator
        n_threads = torch.get_num_threads() if threads is None else threads
        try:
            self.runtime = kind(str(folder), device=device, compute_type=compute_type, intra_threads=n_threads)
        except (RuntimeError, ValueError, LookupError, ArithmeticError, MemoryError) as error:
            if compute_type not in ("default", "auto", *ctranslate2.get_supported_compute_types(device)):
                raise ValueError(f"compute_type={compute_type!r}: {error}") from None
            raise BadModelFile(f"{folder} cannot be opened by CTranslate2: {error}") from None
        self._source_tokens, self._target_tokens = vocabularies(config, processor)
        for file in folder.glob("*vocabulary.json"):
            if json.loads(file.read_bytes()) not in (self._source_tokens, self._target_tokens):
                raise BadModelFile(f"{file} does not list the tokens of this model's tokenizer")
        self._ids = {token: index for index, token in enumerate(self._target_tokens)}

    def _write(self, rows: list[list[int]], config: GenerateConfig) -> list[list[int]]:
        # The runtime forbids tokens before the softmax, so that beams would have other scores than ours.
        allowed = _CT2_FIELDS - {"min_new_tokens"} if config.beam > 1 else _CT2_FIELDS
        for name in sorted(config.model_fields_set - allowed):
            if getattr(config, name) != GenerateConfig.model_fields[name].get_default(call_default_factory=True):
                beside = f" with beam={config.beam}" if name in _CT2_FIELDS else ""
                raise ValueError(f"the ctranslate2 engine has no {name}={getattr(config, name)!r}{beside}; torch has")
        if config.beam > 1 and config.early_stopping is not True:
            stops = f"early_stopping={config.early_stopping!r}"
            raise ValueError(f"the ctranslate2 engine has no {stops} with beam={config.beam}; True, or torch, has")
        is_own_form = config.penalty_form == "hf"
        options: dict[str, Any] = {
            "beam_size": config.beam,
            "num_hypotheses": 1 if is_own_form else config.beam,
            "length_penalty": _exponent(config),
            "return_end_token": True,  # with it, the text has the length by which its score was divided
            "return_scores": not is_own_form,
        }
        out: list[list[int]] = [[] for _ in rows]
        for group, results in self._run_batches(rows, config, options):
            for index, result in zip(group, results, strict=True):
                if self.reads_source:
                    texts = [[self._ids[token] for token in tokens] for tokens in result.hypotheses]
                else:
                    texts = result.sequences_ids
                out[index] = self._best(texts, result.scores, config)
        return out

    def _run_batches(
        self, rows: list[list[int]], config: GenerateConfig, options: dict[str, Any]
    ) -> Iterator[tuple[list[int], list[Any]]]:
        """Indices of rows with their results.

        Prompts go one length at a time: of ragged ones the runtime reads the longer part token by token.
        """
        if self.reads_source:
            limit = min(config.max_new_tokens, (self.config.max_target_len or self.config.max_len) - 1)
            options |= {"max_decoding_length": limit, "min_decoding_length": min(config.min_new_tokens, limit)}
            sources = _words(rows, self._source_tokens)
            yield list(range(len(rows))), self.runtime.translate_batch(sources, max_input_length=0, **options)
            return
        for length in sorted({len(row) for row in rows}):
            group = [index for index, row in enumerate(rows) if len(row) == length]
            limit = min(config.max_new_tokens, self.config.max_len - length)
            options |= {"max_length": limit, "min_length": min(config.min_new_tokens, limit)}
            prompts = _words([rows[index] for index in group], self._target_tokens)
            yield group, self.runtime.generate_batch(prompts, include_prompt_in_result=False, **options)

    def _best(self, texts: list[list[int]], scores: list[float], config: GenerateConfig) -> list[int]:
        text = texts[0]
        if len(texts) > 1:  # rank the texts by the other form of the penalty
            lengths, exponent = [len(text) for text in texts], _exponent(config)
            pairs = zip(scores, lengths, strict=True)
            values = [score * n**exponent / config.length_penalty_at(n) for score, n in pairs]
            text = texts[values.index(max(values))]
        return text[:-1] if text and text[-1] == self.config.eos_id else text

    def log_probs(self, sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
        """log P of each target token after those before it, the end token included."""
        if self.reads_source:
            texts = [_words(sources, self._source_tokens), _words(targets, self._target_tokens)]
        else:
            texts = [_words([[*row, cast(int, self.config.eos_id)] for row in targets], self._target_tokens)]
        return [result.log_probs for result in self.runtime.score_batch(*texts, max_input_length=0)]


class OnnxEngine(TorchEngine):
    """ONNX Runtime computes the logits, our own searches choose the tokens."""

    name: EngineName = "onnx"

    def __init__(self, model: Model, processor: Any) -> None:
        super().__init__(model)
        self.processor = processor


class GgufEngine(Engine):
    """llama.cpp reads model.gguf and computes the logits; the likeliest token is written. Keys and values are float32,
    where llama.cpp by itself keeps half precision."""

    name: EngineName = "gguf"

    def __init__(self, file: Path, config: ModelConfig, processor: Any, *, threads: int | None = None) -> None:
        require_llama_cpp()
        import llama_cpp

        super().__init__(config, processor)
        n_threads, kind = threads or torch.get_num_threads(), llama_cpp.GGML_TYPE_F32
        options: dict[str, Any] = {"n_threads": n_threads, "n_threads_batch": n_threads, "type_k": kind, "type_v": kind}
        self.max_len = min(config.max_len, _LLAMA_CPP_CONTEXT)
        try:
            self.runtime = llama_cpp.Llama(str(file), n_ctx=self.max_len, logits_all=True, verbose=False, **options)
        except ValueError as error:
            raise BadModelFile(f"{file} cannot be opened by llama.cpp: {error}") from None

    def _write(self, rows: list[list[int]], config: GenerateConfig) -> list[list[int]]:
        for name in sorted(config.model_fields_set - {"max_new_tokens", "truncate", "cache"}):
            if getattr(config, name) != GenerateConfig.model_fields[name].get_default(call_default_factory=True):
                raise ValueError(f"the gguf engine has no {name}={getattr(config, name)!r}; torch has")
        return [self._continue(row, min(config.max_new_tokens, self.max_len - len(row))) for row in rows]

    def _continue(self, row: list[int], most: int) -> list[int]:
        text: list[int] = []
        logits = self._logits(row)
        while len(text) < most and (token := int(logits[-1].argmax())) != self.config.eos_id:
            text.append(token)
            if len(text) < most:
                logits = self._logits([token], after=len(row) + len(text) - 1)
        return text

    def _logits(self, tokens: list[int], after: int = 0) -> Tensor:
        """Logits of tokens (T, V) that stand after so many that were read before."""
        if after + len(tokens) > self.max_len:
            raise ValueError(f"the text has {after + len(tokens)} tokens; the gguf engine reads {self.max_len}")
        self.runtime.n_tokens = after
        self.runtime.eval(tokens)
        return torch.from_numpy(self.runtime.scores[after : after + len(tokens)].copy())

    def encode(self, text: str) -> list[int]:
        """The ids of a text by llama.cpp's own tokenizer."""
        return self.runtime.tokenize(text.encode(), add_bos=True, special=False)

    def token_logits(self, source: Tensor, target: Tensor | None = None, padding_mask: Tensor | None = None) -> Tensor:
        out = torch.zeros(*source.shape, self.config.vocab_size)
        lengths = [source.shape[1]] * len(source) if padding_mask is None else padding_mask.sum(1).tolist()
        for row, tokens, length in zip(out, source.tolist(), lengths, strict=True):
            row[:length] = self._logits(tokens[:length])
        return out


def has_llama_cpp() -> bool:
    """Whether llama.cpp's Python package is installed."""
    return importlib.util.find_spec("llama_cpp") is not None


def require_llama_cpp() -> None:
    if not has_llama_cpp():
        raise ValueError('llama-cpp-python is not installed: pip install "regard[llama-cpp]", which builds llama.cpp')


def open_engine(path: str | Path, name: EngineName = "torch", **options: Any) -> Engine:
    """The engine called ``name`` on an exported directory.

    options  of ctranslate2: compute_type ("default", "int8" …), device, threads; of onnx: threads, providers;
             of gguf: threads; of torch: device
    """
    if name not in get_args(EngineName):
        raise ValueError(f"engine={name!r} is none of {', '.join(get_args(EngineName))}")
    root = Path(path)
    if name == "torch":
        return TorchEngine(open_model(root, **options))
    directory = hub.Directory(root)
    fields = directory.config()
    config = hub.read_config(fields).config
    processor = read_processor(directory, fields, config)
    folder = directory.root / _PLACES[name]
    if not folder.exists():
        kinds = ", ".join(engines_in(directory.root))
        raise BadModelFile(f"{root} was not exported as {name}: it holds {kinds}; export it again with that kind")
    if name == "ctranslate2":
        return Ct2Engine(folder, config, processor, **options)
    if name == "gguf":
        return GgufEngine(folder, config, processor, **options)
    from .onnx_export import open_onnx

    return OnnxEngine(open_onnx(directory.root, **options), processor)


def engines_in(root: Path) -> list[EngineName]:
    """Which engines an exported directory can be opened with."""
    return ["torch", *(name for name, place in _PLACES.items() if (root / place).exists())]


def open_model(root: Path, *, device: torch.device | str = "cpu") -> Model:
    """The torch model of an exported directory, float or int8."""
    return open_int8(root).to(device) if is_quantised(root) else open_directory(hub.Directory(root), device=device)


def open_directory(directory: hub.Directory, *, device: torch.device | str = "cpu") -> Model:
    """The torch model of a directory that was opened, or of a GGUF file."""
    fields, weights = directory.config(), directory.weights()
    fields.setdefault("has_pooler", any("pooler." in name for name in weights.layout))
    resolved = hub.read_config(fields)
    fitting = hub.fit(resolved.config, resolved.steps, weights.layout)
    model = hub.fill(fitting, resolved.steps, weights, torch.device(device), None)
    model.processor = read_processor(directory, fields, resolved.config)
    return model


def _words(rows: list[list[int]], tokens: list[str]) -> list[list[str]]:
    return [[tokens[index] for index in row] for row in rows]


def _exponent(config: GenerateConfig) -> float:
    """The exponent of CTranslate2's length penalty n^α; exactly 0 would change its stopping rule.

    By it the runtime chooses the texts that it returns. For ((5 + n) / 6)^α half of α is used, which is how that form
    grows at the length of a short sentence, so that the best text by that form is among them.
    """
    alpha = config.length_penalty if config.penalty_form == "hf" else config.length_penalty / 2
    return alpha or 1e-9
