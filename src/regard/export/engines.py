"""Four engines with one interface over an exported directory: torch, ONNX Runtime, CTranslate2, llama.cpp.

    engine = open_engine(path, "ctranslate2")
    engine.translate(["The cat sleeps."], beam=4)        texts in, texts out
    engine.write([[5, 9, 2]], GenerateConfig(beam=4))    token ids in, token ids out

Inputs are checked, limited and batched here, in the same way for all engines.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from .. import hub
from ..config import ModelConfig
from ..errors import BadModelFile
from ..foundation.checks import check_positive
from ..foundation.plugins import import_optional
from ..generation import GenerateConfig, generate
from ..generation.prompts import default_output_length, fill_empty_rows, pad_prompts, source_tensors
from ..generation.stop_conditions import decode_after
from ..generation.text_codec import split_special_tokens, with_rules
from ..hub.gguf_file import NAME as GGUF_FILE
from ..models import Model
from ..text import read_processor
from .ctranslate2_export import FOLDER as CT2_FOLDER
from .ctranslate2_export import import_ctranslate2, vocabularies
from .quantise import is_quantised, open_int8

EngineName = Literal["torch", "onnx", "ctranslate2", "gguf"]
Side = Literal["source", "target"]
ONNX_FOLDER = "onnx"
_PATHS: dict[EngineName, str] = {"onnx": ONNX_FOLDER, "ctranslate2": CT2_FOLDER, "gguf": GGUF_FILE}
_CT2_FIELDS = {  # the fields of GenerateConfig that CTranslate2 supports
    *("max_new_tokens", "min_new_tokens", "beam", "length_penalty", "penalty_form", "early_stopping"),
    *("truncate", "cache"),
}
_LLAMA_CPP_CONTEXT = 4096  # the longest text for llama.cpp, which keeps the logits of every token


class Engine(ABC):
    """Generates texts; a subclass defines how rows of ids become rows of ids."""

    name: EngineName
    early_stopping = False  # the default in ``translate`` and ``generate``

    def __init__(self, config: ModelConfig, processor: Any) -> None:
        self.config, self.processor = config, processor
        self.end_ids = [index for index in (config.eos_id, *config.more_eos_ids) if index is not None]

    @abstractmethod
    def _write(self, rows: list[list[int]], config: GenerateConfig) -> list[list[int]]:
        """The best output for each checked source or prompt, without the end token."""

    def write(
        self, rows: Sequence[Sequence[int]], config: GenerateConfig | None = None, **fields: Any
    ) -> list[list[int]]:
        """New tokens for each row of token ids, a source or a prompt, without the end token."""
        config = (config or GenerateConfig()).with_(**fields)
        lists = [list(row) for row in rows]
        return self._write(self._check_rows(lists, config), config) if lists else []

    def _check_fields(self, config: GenerateConfig, supported: set[str]) -> None:
        """Raise if a field other than the supported ones differs from its default, and from the model's own rules."""
        defaults = GenerateConfig(), with_rules(GenerateConfig(), self.config)
        for name in sorted(config.model_fields_set - supported):
            if (value := getattr(config, name)) not in [getattr(default, name) for default in defaults]:
                raise ValueError(f"the {self.name} engine does not support {name}={value!r}; the torch engine does")

    def token_logits(self, source: Tensor, target: Tensor | None = None, padding_mask: Tensor | None = None) -> Tensor:
        """Logits of every token (B, T, V), or of the classes (B, C); TypeError if the engine returns none."""
        raise TypeError(f"the {self.name} engine returns no logits")

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
        """The translation of each text, in batches of similar length; an empty text stays empty.

        The defaults are those of ``regard.translate``, with one exception: CTranslate2's beam search supports only
        early_stopping=True, so that is its default and other values are refused.
        """
        if self.config.architecture not in ("encoder-decoder", "recurrent") or self.config.source != "text":
            kind = f"architecture={self.config.architecture!r}, source={self.config.source!r}"
            raise ValueError(f"{kind} cannot translate text")
        penalty: dict[str, Any] = {"length_penalty": length_penalty, "penalty_form": penalty_form}
        early_stopping = self.early_stopping if early_stopping is None else early_stopping
        config = GenerateConfig(beam=beam, early_stopping=early_stopping, truncate=truncate, **penalty)
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
        """The continuation of each prompt, without the prompt."""
        if self.config.architecture != "decoder":
            raise ValueError(f"architecture={self.config.architecture!r} reads a source; use translate")
        options: dict[str, Any] = {"length_penalty": length_penalty, "early_stopping": self.early_stopping}
        config = GenerateConfig(beam=beam, truncate=truncate, **options)
        return self._write_texts(prompts, "target", config, max_new_tokens, batch)

    def _write_texts(
        self, texts: Sequence[str], side: Side, config: GenerateConfig, max_new_tokens: int | None, batch: int
    ) -> list[str]:
        """Translations of sources, or continuations of prompts, in batches of similar length.

        ``side`` is the tokenizer's side: "source" for sources, "target" for prompts.
        """
        if isinstance(texts, str):
            raise TypeError("texts is a single string; pass a list of strings")
        check_positive(batch=batch)
        decode = self.tokenizer("target").decode
        rows = [self._encode(text, side) for text in texts]
        limits = [
            default_output_length(self.config, len(row)) if max_new_tokens is None else max_new_tokens for row in rows
        ]
        # An empty source gives an empty text: engines disagree on the output for a lone end token.
        order = [index for index, text in enumerate(texts) if side == "target" or text.strip()]
        order.sort(key=lambda index: len(rows[index]), reverse=True)
        out = [""] * len(rows)
        # Rows are batched only with rows of the same limit, so that no output depends on the other rows.
        for limit, indices in itertools.groupby(order, key=limits.__getitem__):
            same_limit = list(indices)
            for group in (same_limit[start : start + batch] for start in range(0, len(same_limit), batch)):
                outputs = self.write([rows[i] for i in group], config.with_(max_new_tokens=limit))
                for index, tokens in zip(group, outputs, strict=True):
                    decode_row = decode_after(decode, rows[index]) if side == "target" else decode
                    out[index] = decode_row(tokens)
        return out

    def _encode(self, text: str, side: Side) -> list[int]:
        """Ids of a source with its special tokens, or of a prompt without the special tokens that end a text."""
        if side == "source":
            return list(self.tokenizer(side).encode(text))
        first, ids, _ = split_special_tokens(self.tokenizer(side), text)
        return [*first, *ids]

    def _check_rows(self, rows: list[list[int]], config: GenerateConfig) -> list[list[int]]:
        """The rows, checked and truncated as in ``generate``."""
        if self.config.architecture != "decoder":
            return [item.tolist() for item in source_tensors(rows, None, self.config, config.truncate)]
        prompts = fill_empty_rows(rows, self.config.bos_id, "prompt")
        return pad_prompts(prompts, self.config, config, torch.device("cpu")).rows

    def tokenizer(self, side: Side) -> Any:
        """The tokenizer of the source or target; the other one if the model has only one."""
        tokenizer = None if self.processor is None else self.processor.tokenizer_of(side)
        if tokenizer is None:
            raise ValueError("this model has no tokenizer, so it reads token ids: use write")
        return tokenizer


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
            name = "padding_mask" if self.config.architecture == "two-tower" else "source_padding_mask"
            return self.model(source, target, **{name: padding_mask})
        return self.model(source) if padding_mask is None else self.model(source, padding_mask=padding_mask)


class Ct2Engine(Engine):
    """CTranslate2's runtime. ``compute_type="int8"`` quantises the weights when they are loaded.

    Its beam search equals regard's with early_stopping=True; other values of that field are refused.
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
        ctranslate2 = import_ctranslate2()
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
        self._check_fields(config, _CT2_FIELDS)
        if config.beam > 1 and config.min_new_tokens:  # it forbids the end before the softmax, which changes the scores
            setting = f"min_new_tokens={config.min_new_tokens} with beam={config.beam}"
            raise ValueError(f"the ctranslate2 engine does not support {setting}; the torch engine does")
        if config.beam > 1 and config.early_stopping is not True:
            setting = f"early_stopping={config.early_stopping!r} with beam={config.beam}"
            raise ValueError(f"the ctranslate2 engine does not support {setting}; use True, or the torch engine")
        is_own_form = config.penalty_form == "hf"  # the form that CTranslate2 ranks by itself
        options: dict[str, Any] = {
            "beam_size": config.beam,
            "num_hypotheses": 1 if is_own_form else config.beam,
            "length_penalty": _exponent(config),
            "end_token": self.end_ids,
            "suppress_sequences": [[self._target_tokens[index]] for index in self.config.forbidden_ids] or None,
            "return_end_token": True,  # its score was divided by the length that includes it
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
        """Yield the indices of some rows with their results.

        Prompts are grouped by length, because CTranslate2 reads the ragged end of longer prompts token by token.
        """
        if self.reads_source:
            limit = min(config.max_new_tokens, (self.config.max_target_len or self.config.max_len) - 1)
            options |= {"max_decoding_length": limit, "min_decoding_length": min(config.min_new_tokens, limit)}
            sources = _token_names(rows, self._source_tokens)
            yield list(range(len(rows))), self.runtime.translate_batch(sources, max_input_length=0, **options)
            return
        for length in sorted({len(row) for row in rows}):
            group = [index for index, row in enumerate(rows) if len(row) == length]
            limit = min(config.max_new_tokens, self.config.max_len - length)
            options |= {"max_length": limit, "min_length": min(config.min_new_tokens, limit)}
            prompts = _token_names([rows[index] for index in group], self._target_tokens)
            yield group, self.runtime.generate_batch(prompts, include_prompt_in_result=False, **options)

    def _best(self, texts: list[list[int]], scores: list[float], config: GenerateConfig) -> list[int]:
        """The best of the returned texts, up to its end token."""
        text = texts[0]
        if len(texts) > 1:  # rank them by the other form of the length penalty
            lengths, exponent = [len(text) for text in texts], _exponent(config)
            pairs = zip(scores, lengths, strict=True)
            values = [score * n**exponent / config.length_penalty_at(n) for score, n in pairs]
            text = texts[values.index(max(values))]
        # With several end tokens, CTranslate2's beam search may continue a text after one of them.
        return text[: next((n for n, token in enumerate(text) if token in self.end_ids), len(text))]

    def log_probs(self, sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
        """log P of each target token given the preceding ones, including the end token."""
        if self.reads_source:
            texts = [_token_names(sources, self._source_tokens), _token_names(targets, self._target_tokens)]
        else:
            texts = [_token_names([[*row, cast(int, self.config.eos_id)] for row in targets], self._target_tokens)]
        return [result.log_probs for result in self.runtime.score_batch(*texts, max_input_length=0)]


class OnnxEngine(TorchEngine):
    """ONNX Runtime computes the logits; regard's own decoding chooses the tokens."""

    name: EngineName = "onnx"


class GgufEngine(Engine):
    """Greedy decoding with the logits of llama.cpp, which reads model.gguf.

    The cache is float32 instead of llama.cpp's default, half precision.
    """

    name: EngineName = "gguf"

    def __init__(self, file: Path, config: ModelConfig, processor: Any, *, threads: int | None = None) -> None:
        llama_cpp = import_optional("llama_cpp", "the gguf engine", "llama-cpp")
        super().__init__(config, processor)
        n_threads, dtype = threads or torch.get_num_threads(), llama_cpp.GGML_TYPE_F32
        options: dict[str, Any] = {"n_threads": n_threads, "n_threads_batch": n_threads}
        options |= {"type_k": dtype, "type_v": dtype}
        self.max_len = min(config.max_len, _LLAMA_CPP_CONTEXT)
        try:
            self.runtime = llama_cpp.Llama(str(file), n_ctx=self.max_len, logits_all=True, verbose=False, **options)
        except ValueError as error:
            raise BadModelFile(f"{file} cannot be opened by llama.cpp: {error}") from None

    def _write(self, rows: list[list[int]], config: GenerateConfig) -> list[list[int]]:
        self._check_fields(config, {"max_new_tokens", "truncate", "cache"})
        return [self._continue(row, min(config.max_new_tokens, self.max_len - len(row))) for row in rows]

    def _continue(self, row: list[int], limit: int) -> list[int]:
        text, token = list[int](), self._next_token(row)
        while len(text) < limit and token not in self.end_ids:
            text.append(token)
            if len(text) < limit:
                token = self._next_token([token], after=len(row) + len(text) - 1)
        return text

    def _next_token(self, tokens: list[int], after: int = 0) -> int:
        logits = self._logits(tokens, after)[-1]
        logits[list(self.config.forbidden_ids)] = -math.inf
        return int(logits.argmax())

    def _logits(self, tokens: list[int], after: int = 0) -> Tensor:
        """Logits (T, V) of tokens that follow the first ``after`` tokens in llama.cpp's cache."""
        if after + len(tokens) > self.max_len:
            raise ValueError(f"the text has {after + len(tokens)} tokens; the gguf engine reads at most {self.max_len}")
        self.runtime.n_tokens = after
        self.runtime.eval(tokens)
        return torch.from_numpy(self.runtime.scores[after : after + len(tokens)].copy())

    def encode(self, text: str) -> list[int]:
        """The ids that llama.cpp's own tokenizer gives a text."""
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


def open_engine(path: str | Path, name: EngineName = "torch", **options: Any) -> Engine:
    """Open an exported directory with the engine called ``name``.

    Options: compute_type ("default", "int8" …), device and threads for ctranslate2; threads and providers for onnx;
    threads for gguf; device for torch.
    """
    if name not in get_args(EngineName):
        raise ValueError(f"engine={name!r} is not one of {', '.join(get_args(EngineName))}")
    root = Path(path)
    if name == "torch":
        return TorchEngine(open_model(root, **options))
    directory = hub.Directory(root)
    folder = directory.root / _PATHS[name]
    if not folder.exists():
        raise BadModelFile(f"{root} was not exported as {name}; regard export {root} {name} shipped makes one")
    if name == "onnx":
        from .onnx_export import open_onnx

        return OnnxEngine(open_onnx(directory.root, **options))
    fields = directory.config()
    config = hub.read_config(fields).config
    processor = read_processor(directory, fields, config)
    if name == "ctranslate2":
        return Ct2Engine(folder, config, processor, **options)
    return GgufEngine(folder, config, processor, **options)


def engines_in(root: Path) -> list[EngineName]:
    """The engines that can open an exported directory."""
    return ["torch", *(name for name, path in _PATHS.items() if (root / path).exists())]


def open_model(root: Path, *, device: torch.device | str = "cpu") -> Model:
    """The torch model in an exported directory, float or int8."""
    return open_int8(root).to(device) if is_quantised(root) else open_directory(hub.Directory(root), device=device)


def open_directory(directory: hub.Directory, *, device: torch.device | str = "cpu") -> Model:
    """The torch model in an open directory or GGUF file."""
    fields, weights = directory.config(), directory.weights()
    fields.setdefault("has_pooler", any("pooler." in name for name in weights.layout))
    resolved = hub.read_config(fields)
    fitting = hub.fit(resolved.config, resolved.steps, weights.layout)
    model = hub.fill(fitting, resolved.steps, weights, torch.device(device), None)
    model.processor = read_processor(directory, fields, resolved.config)
    return model


def _token_names(rows: list[list[int]], tokens: list[str]) -> list[list[str]]:
    return [[tokens[index] for index in row] for row in rows]


def _exponent(config: GenerateConfig) -> float:
    """The exponent of CTranslate2's length penalty n^α; exactly 0 would change its stopping rule.

    CTranslate2 ranks the texts it returns by this penalty. For ((5 + n) / 6)^α half of α is used: that form grows about
    as fast as n^(α/2) at the length of a short sentence, so the text it prefers is among those returned.
    """
    alpha = config.length_penalty if config.penalty_form == "hf" else config.length_penalty / 2
    return alpha or 1e-9
