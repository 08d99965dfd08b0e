"""What a training run is: a task, its data, its model, its recipe."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import field_validator, model_validator

from .base import Config, split_commas
from .data_config import DataConfig
from .model_config import ModelConfig

Task = Literal["translate", "lm", "mlm", "sft", "dpo", "classify", "classify-images", "tag", "caption"]

Metric = Literal[
    "auto", "loss", "accuracy", "macro_f1", "micro_f1", "entity_f1", "exact", "pearson", "spearman", "mse", "bleu",
    "chrf", "cider",
]  # fmt: skip

# The models each task trains: architecture, source and head. The first is what another model is made into.
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
}

# What may change when a run goes on: nothing that says which batches there are, or what a checkpoint holds.
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
    """Of everything drawn: weights, order, dropout."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to compute."""
    steps: int = 1000
    """Optimiser steps."""
    batch_tokens: int = 4096
    """Tokens in a batch, padding included; of pairs each side keeps to it, of images it counts patches."""
    batch_size: int | None = None
    """Most examples in a batch; None: as many as batch_tokens allow."""
    accumulate: int = 1
    """Batches, on each process, whose gradients are added up for one step."""

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
    """On matrices; never on norms, biases and tables."""
    schedule: Literal["noam", "cosine", "wsd", "constant"] = "cosine"
    """How the learning rate moves: the paper's, cosine, warm-up-stable-decay, level."""
    warmup: int = 100
    """Steps of rising learning rate."""
    schedule_start: int = 0
    """The step after which the schedule begins: 0, or where a finished run was extended with a new warm-up."""
    floor: float = 0.0
    """Share of the peak learning rate that cosine and wsd end with."""
    clip: float | None = 1.0
    """Largest norm of the gradient; None: any."""
    label_smoothing: float = 0.0
    """Share of each target spread over all classes (the paper: 0.1)."""
    r_drop: float = 0.0
    """Weight of the distance between two passes over each batch that differ in dropout (R-Drop, its α: 5 is usual for
    translation); 0: one pass."""
    class_weights: Literal["none", "balanced"] | tuple[float, ...] = "none"
    """Factors on the training loss of each class: one for each in the order of data.labels, or balanced, n / (classes ×
    n of the class), by which every class counts as much as any other."""
    sampling: Literal["shuffled", "balanced"] = "shuffled"
    """What an epoch shows: every example once, or those of rarer classes again until all classes are equally many."""

    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """Of the matrix products, the weights that are trained staying fp32; auto: bf16 where the GPU, or a matrix unit of
    the CPU, has it. fp8: those of linear layers, on one GPU (experimental)."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile: where it pays back within the run, always, never."""
    checkpointing: bool = False
    """Compute each layer again in the backward pass to save memory."""
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """Over the processes torchrun started: whole copies, or sharded; auto: ddp."""

    ema: float | None = None
    """Keep a moving average of the weights with this decay, and evaluate and save it."""
    average: int = 0
    """At the end, average the weights of the last so many checkpoints."""
    eval_every: int = 200
    """Steps between evaluations; 0: only at the end."""
    eval_batches: int | None = None
    """Batches of an evaluation's loss; None: all validation data."""
    eval_examples: int | None = None
    """Held-out examples that an evaluation has answered, a seeded sample of all lengths and classes; None: every one
    where an answer is a class, 200 where it is a text. The last evaluation takes all."""
    metric: Metric = "auto"
    """What makes a checkpoint the best, and what patience waits for; auto: accuracy of classes, macro F1 of several
    labels and of tags (of entities where tags are B-X, I-X and O), Pearson's r of numbers, else the loss."""
    save_every: int = 200
    """Steps between checkpoints; 0: only at the end."""
    keep: int = 3
    """Checkpoints kept beside the best."""
    patience: int | None = None
    """Stop after so many evaluations without a better one."""
    log_every: int = 20
    """Steps between lines of metrics.jsonl."""
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    """Who gets the numbers beside metrics.jsonl: tensorboard, wandb (Weights & Biases), mlflow."""
    samples: int = 3
    """Examples shown with each evaluation."""
    beam: int = 1
    """Beam width of the last evaluation."""
    length_penalty: float = 1.0
    """Its length penalty."""
    stop_at: int | None = None
    """Stop after this step as if interrupted."""

    ship_to: tuple[Literal["onnx", "hf", "ctranslate2", "gguf", "int8"], ...] = ()
    """Kinds of export the model is meant for: what it cannot be exported as is refused before training."""
    init: str | None = None
    """Start from a run or a Hugging Face directory: its architecture, weights and tokenizers; typed fields override."""
    init_partial: bool = False
    """Start from it even where less than half of its layers' weights fit."""
    teacher: str | None = None
    """Learn from the probabilities of this model too: a run or a Hugging Face directory (knowledge distillation)."""
    teacher_weight: float = 0.5
    """Share of the loss that is the distance from the teacher; the rest is the loss of the data."""
    teacher_temperature: float = 1.0
    """What the logits of both are divided by before they are compared."""
    freeze: tuple[str, ...] = ()
    """Parameters left as they are: names, * for anything."""
    lora: int | None = None
    """Train low-rank additions of this rank instead of the weights; merged on save."""
    lora_alpha: float | None = None
    """Their scale, over the rank; None: twice the rank."""
    lora_targets: tuple[str, ...] = ("w_qkv", "w_q", "w_kv", "w_o")
    """Which linear layers get them, by the last part of their names."""

    quantize: Literal["none", "nf4"] = "none"
    """With lora: how the frozen linear layers are stored; nf4: in four bits (QLoRA)."""
    dpo_beta: float = 0.1
    """Of the task dpo: how much it costs to leave the model it starts from."""

    _split = field_validator("freeze", "lora_targets", "betas", "ship_to", "loggers", mode="before")(split_commas)

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.check_at_least(1, _POSITIVE)
        self.check_at_least(0, _NOT_NEGATIVE)
        for name in ("lr", "muon_lr", "clip", "teacher_temperature", "dpo_beta"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value} must be a positive number")
        if self.schedule_start >= self.steps:
            raise ValueError(f"schedule_start={self.schedule_start} must be less than steps={self.steps}")
        self.check_shares(("label_smoothing", "ema", "floor"))
        if self.quantize != "none" and self.lora is None:
            raise ValueError(f"quantize={self.quantize} needs lora: what is stored in four bits cannot learn")
        if self.r_drop and self.teacher is not None:
            raise ValueError(f"r_drop={self.r_drop} compares a model with itself; leave it out beside teacher")
        if not 0 <= self.teacher_weight <= 1:
            raise ValueError(f"teacher_weight={self.teacher_weight} must lie in [0, 1]")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas} must lie in [0, 1)")
        if not isinstance(self.class_weights, str) and not all(0 <= x < math.inf for x in self.class_weights):
            raise ValueError(f"class_weights={self.class_weights} must not be negative")
        return self


_POSITIVE = ("steps", "batch_tokens", "batch_size", "accumulate", "keep", "log_every", "beam", "lora", "patience")
_NOT_NEGATIVE = (
    *("warmup", "schedule_start", "average", "eval_every", "eval_examples", "save_every", "samples", "weight_decay"),
    "eps",
    "r_drop",
)


class RunConfig(Config):
    """Everything a run depends on."""

    task: Task
    """What is learned."""
    data: DataConfig = DataConfig()
    """Where examples come from."""
    model: ModelConfig = ModelConfig()
    """What learns."""
    train: TrainConfig = TrainConfig()
    """How."""
