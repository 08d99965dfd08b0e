"""RunConfig and TrainConfig: a training run is a task, its data, its model and its recipe."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import field_validator, model_validator

from .base import Config, split_commas
from .data_config import DataConfig
from .model_config import ModelConfig

Task = Literal[
    "translate", "lm", "mlm", "electra", "sft", "dpo", "classify", "classify-images", "tag", "caption", "contrast",
    "embed", "answer",
]  # fmt: skip

Metric = Literal[
    "auto", "loss", "accuracy", "macro_f1", "micro_f1", "entity_f1", "exact", "pearson", "spearman", "mse", "bleu",
    "chrf", "cider", "recall_1", "mrr",
]  # fmt: skip

# The models each task trains: architecture, source and head. Another model is converted to the first.
TASK_MODELS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "translate": (("encoder-decoder", "text", "lm"), ("recurrent", "text", "lm")),
    "lm": (("decoder", "text", "lm"),),
    "mlm": (("encoder", "text", "masked-lm"),),
    "sft": (("decoder", "text", "lm"),),
    "dpo": (("decoder", "text", "lm"),),
    "classify": (("encoder", "text", "classify"),),
    "classify-images": (("encoder", "image", "classify"),),
    "tag": (("encoder", "text", "tag"),),
    "caption": (("encoder-decoder", "image", "lm"),),
    "electra": (("encoder", "text", "replaced"),),
    "answer": (("encoder-decoder", "text", "lm"),),
    "embed": (("encoder", "text", "none"), ("decoder", "text", "none")),
    "contrast": (("two-tower", "image", "none"),),
}

# Fields that may change when a run is resumed: none that determines the batches or the contents of a checkpoint.
RESUMABLE = (
    *("steps", "stop_at", "eval_every", "eval_batches", "eval_examples", "save_every", "log_every", "samples", "keep"),
    *("patience", "average", "beam", "length_penalty", "lr", "muon_lr", "betas", "eps", "weight_decay", "schedule"),
    *("warmup", "floor", "clip", "label_smoothing", "device", "checkpointing", "parallel", "loggers"),
)


class TrainConfig(Config):
    """The recipe."""

    out: str | None = None
    """The run's directory; None: runs/TASK-TIME."""
    seed: int = 0
    """Seed of all random choices: weights, order, dropout."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to compute."""
    steps: int = 1000
    """Optimiser steps."""
    batch_tokens: int = 4096
    """Tokens per batch, including padding; a limit on each side of pairs, and on the patches of images."""
    batch_size: int | None = None
    """Maximum examples per batch; None: as many as batch_tokens allow."""
    accumulate: int = 1
    """Batches per process whose gradients are accumulated for one step."""

    optimiser: Literal["adam", "adamw", "muon"] = "adamw"
    """Adam as in the paper, AdamW, or Muon for the matrices inside layers and AdamW for the rest."""
    lr: float = 1e-3
    """Peak learning rate."""
    muon_lr: float = 0.02
    """Peak learning rate of the matrices that Muon trains."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Adam's decay rates."""
    eps: float = 1e-9
    """Adam's ε."""
    weight_decay: float = 0.0
    """Weight decay of matrices; norms, biases and tables never decay."""
    schedule: Literal["noam", "cosine", "wsd", "constant"] = "cosine"
    """Learning rate schedule: the paper's, cosine, warm-up-stable-decay, or constant."""
    warmup: int = 100
    """Warm-up steps, over which the learning rate rises."""
    schedule_start: int = 0
    """The step after which the schedule begins: 0, or the end of a finished run that was extended with a new
    warm-up."""
    floor: float = 0.0
    """Share of the peak learning rate that cosine and wsd end with."""
    clip: float | None = 1.0
    """Maximum norm of the gradient; None: no limit."""
    label_smoothing: float = 0.0
    """Share of each target spread over all classes (the paper: 0.1)."""
    r_drop: float = 0.0
    """Weight of the distance between two passes over each batch that differ in dropout (R-Drop's α; 5 is usual for
    translation); 0: one pass."""
    class_weights: Literal["none", "balanced"] | tuple[float, ...] = "none"
    """Factors on the training loss of each class, in the order of data.labels; or balanced, n / (classes × n of the
    class), which gives all classes equal weight."""
    sampling: Literal["shuffled", "balanced"] = "shuffled"
    """What an epoch contains: every example once, or rarer classes repeatedly, until all classes are equally
    frequent."""

    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """Precision of matrix products; the trained weights stay fp32. auto: bf16 if the GPU, or a matrix unit of the CPU,
    supports it. fp8: for linear layers, on one GPU (experimental)."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile: if it saves time within the run, always, never."""
    checkpointing: bool = False
    """Recompute each layer in the backward pass to save memory."""
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """How the processes of torchrun share a model: whole copies, or shards; auto: ddp."""

    ema: float | None = None
    """Keep a moving average of the weights with this decay, and evaluate and save it."""
    average: int = 0
    """At the end, average the weights of this many last checkpoints."""
    eval_every: int = 200
    """Steps between evaluations; 0: only at the end."""
    eval_batches: int | None = None
    """Batches for the loss of an evaluation; None: all validation data."""
    eval_examples: int | None = None
    """Held-out examples that an evaluation answers, a seeded sample of all lengths and classes; None: all if answers
    are classes, 200 if they are texts. The last evaluation answers all."""
    metric: Metric = "auto"
    """The metric that selects the best checkpoint and that patience watches; auto: accuracy of classes, macro F1 of
    multiple labels and of tags (of entities if tags are B-X, I-X and O), Pearson's r of numbers, else the loss."""
    save_every: int = 200
    """Steps between checkpoints; 0: only at the end."""
    keep: int = 3
    """Checkpoints kept in addition to the best."""
    patience: int | None = None
    """Stop after this many evaluations without improvement."""
    log_every: int = 20
    """Steps between lines of metrics.jsonl."""
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    """Metric loggers in addition to metrics.jsonl: tensorboard, wandb (Weights & Biases), mlflow."""
    samples: int = 3
    """Examples shown with each evaluation."""
    beam: int = 1
    """Beam width of the last evaluation."""
    length_penalty: float = 1.0
    """Length penalty of the last evaluation."""
    stop_at: int | None = None
    """Stop after this step as if interrupted."""

    ship_to: tuple[Literal["onnx", "hf", "ctranslate2", "gguf", "int8"], ...] = ()
    """Intended exports of the model; a kind that it does not support is rejected before training."""
    init: str | None = None
    """Start from a run or a Hugging Face directory: its architecture, weights and tokenizers; typed fields override."""
    init_partial: bool = False
    """Start from init even if less than half of its layers' weights fit."""
    teacher: str | None = None
    """Also learn from the probabilities of this model: a run or a Hugging Face directory (knowledge distillation)."""
    teacher_weight: float = 0.5
    """Share of the loss that is the distance from the teacher; the rest is the loss of the data."""
    teacher_temperature: float = 1.0
    """Temperature by which the logits of both models are divided before they are compared."""
    language_model: str | None = None
    """A run or directory of a language model that writes captions; it is frozen, the rest is trained (Flamingo)."""
    freeze: tuple[str, ...] = ()
    """Names of parameters to freeze; * matches anything."""
    lora: int | None = None
    """Train low-rank additions of this rank instead of the weights; merged on save."""
    lora_alpha: float | None = None
    """Scale of these additions, divided by the rank; None: twice the rank."""
    lora_targets: tuple[str, ...] = ("w_qkv", "w_q", "w_kv", "w_o")
    """Which linear layers get them, by the last part of their names."""

    quantize: Literal["none", "nf4"] = "none"
    """With lora: how the frozen linear layers are stored; nf4: in four bits (QLoRA)."""
    dpo_beta: float = 0.1
    """Task dpo: how strongly the model is held to the one it starts from."""
    temperature: float = 0.05
    """Task embed: temperature by which cosines are divided before they are compared (InfoNCE)."""

    _split = field_validator("freeze", "lora_targets", "betas", "ship_to", "loggers", mode="before")(split_commas)

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.check_at_least(1, _POSITIVE)
        self.check_at_least(0, _NOT_NEGATIVE)
        for name in ("lr", "muon_lr", "clip", "lora_alpha", "teacher_temperature", "dpo_beta", "temperature"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value} must be a positive number")
        if self.schedule_start >= self.steps:
            raise ValueError(f"schedule_start={self.schedule_start} must be less than steps={self.steps}")
        self.check_shares(("label_smoothing", "ema", "floor"))
        if self.quantize != "none" and self.lora is None:
            raise ValueError(f"quantize={self.quantize} needs lora: four-bit weights cannot be trained")
        if self.r_drop and self.teacher is not None:
            raise ValueError(f"r_drop={self.r_drop} cannot be combined with teacher")
        if not 0 <= self.teacher_weight <= 1:
            raise ValueError(f"teacher_weight={self.teacher_weight} must lie in [0, 1]")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas} must lie in [0, 1)")
        if not isinstance(self.class_weights, str) and not all(0 <= x < math.inf for x in self.class_weights):
            raise ValueError(f"class_weights={self.class_weights} must not be negative")
        return self


_POSITIVE = (
    *("steps", "batch_tokens", "batch_size", "accumulate", "keep", "log_every", "beam", "lora", "patience"),
    *("eval_batches", "stop_at"),
)
_NOT_NEGATIVE = (
    *("warmup", "schedule_start", "average", "eval_every", "eval_examples", "save_every", "samples", "weight_decay"),
    *("eps", "r_drop"),
)


class RunConfig(Config):
    """Everything a run depends on."""

    task: Task
    """The training task."""
    data: DataConfig = DataConfig()
    """The data."""
    model: ModelConfig = ModelConfig()
    """The model."""
    train: TrainConfig = TrainConfig()
    """The training recipe."""
