"""Predicted and measured memory of a training step: the table of docs/cost.md.

    PYTHONPATH=src python benchmarks/memory_gpu.py --out runs/memory            # on a GPU
    PYTHONPATH=src python benchmarks/memory_gpu.py --device cpu --small    # small, by counting live tensors

Each configuration is trained for two steps with the repository's own parts (objective, precision, clipping,
optimiser), the second of which is measured with ``torch.cuda.max_memory_allocated``. Writes memory.json and memory.md,
and prints the memory after each stage and the tensors at the peak, so that a wrong prediction can be traced.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from measuring import LiveBytes, saved_bytes
from torch import Tensor

from regard.config import ModelConfig, TrainConfig
from regard.experiments.flops_estimate import parameter_groups
from regard.experiments.memory_estimate import Setting, TrainingMemory, training_memory
from regard.models import Model
from regard.models.build import build
from regard.models.model_flops import source_places
from regard.presets import PRESETS
from regard.training.averaging import Ema
from regard.training.gradient_pass import WorkingWeights
from regard.training.loss import IGNORE, Batch, Objective
from regard.training.optimiser import Optimiser, build_optimiser
from regard.training.parallel import clip_grad_norm
from regard.training.precision import Precision

GIB = float(1 << 30)
LLAMA = {"n_layers": 8, "d_model": 1024, "n_heads": 16, "n_kv_heads": 4, "d_ff": 2816, "max_len": 4096}
CHECKPOINTED = {"checkpointing": True}
CLASSIFY = {"head": "classify", "pooler": "tanh"}

# name, preset, changes of the model, how it is trained
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("gpt2", "gpt2", {}, {"batch": 16, "length": 1024}),
    ("gpt2, checkpointed", "gpt2", {}, {"batch": 32, "length": 1024, "checkpointing": True}),
    ("gpt2, fp32", "gpt2", {}, {"batch": 8, "length": 1024, "precision": "fp32"}),
    ("gpt2, fp16", "gpt2", {}, {"batch": 8, "length": 1024, "precision": "fp16"}),
    ("gpt2, reference", "gpt2", {}, {"batch": 4, "length": 1024, "attention": "reference"}),
    ("gpt2, reference, fp32", "gpt2", {}, {"batch": 4, "length": 1024, "attention": "reference", "precision": "fp32"}),
    (
        "gpt2, reference, checkpointed",
        "gpt2",
        {},
        {"batch": 8, "length": 1024, "attention": "reference", "checkpointing": True},
    ),
    ("gpt2, length 4096", "gpt2", {"max_len": 4096}, {"batch": 4, "length": 4096}),
    ("gpt2, dropout 0.1", "gpt2", {"dropout": 0.1, "embedding_dropout": 0.1}, {"batch": 16, "length": 1024}),
    ("gpt2, Muon and moving average", "gpt2", {}, {"batch": 4, "length": 1024, "optimiser": "muon", "ema": True}),
    ("gpt2-medium, Muon", "gpt2-medium", {}, {"batch": 8, "length": 1024, "optimiser": "muon"}),
    ("gpt2-large, small batch", "gpt2-large", {}, {"batch": 1, "length": 512}),
    ("gpt2, window 256", "gpt2", {"window": 256}, {"batch": 8, "length": 1024}),
    ("llama, GQA", "llama-1b", LLAMA, {"batch": 4, "length": 2048}),
    ("llama, GQA, checkpointed", "llama-1b", LLAMA, {"batch": 8, "length": 2048, "checkpointing": True}),
    ("llama, GQA, fp32", "llama-1b", LLAMA, {"batch": 2, "length": 1024, "precision": "fp32"}),
    ("llama, MQA", "llama-1b", {**LLAMA, "n_kv_heads": 1}, {"batch": 4, "length": 2048}),
    ("llama-1b", "llama-1b", {}, {"batch": 2, "length": 2048}),
    ("transformer-base", "transformer-base", {}, {"batch": 128, "length": 128, "smoothing": 0.1}),
    ("transformer-base, fp32", "transformer-base", {}, {"batch": 64, "length": 128, "precision": "fp32"}),
    (
        "transformer-base, checkpointed",
        "transformer-base",
        {},
        {"batch": 256, "length": 128, "checkpointing": True, "smoothing": 0.1},
    ),
    (
        "transformer-big, reference",
        "transformer-big",
        {},
        {"batch": 32, "length": 128, "source_length": 96, "attention": "reference", "smoothing": 0.1},
    ),
    ("t5-small", "t5-small", {}, {"batch": 32, "length": 256}),
    ("bert, masked", "bert-base-masked", {}, {"batch": 32, "length": 512, "counted": 0.15}),
    ("bert, classes, fp32", "bert-base", CLASSIFY, {"batch": 16, "length": 512, "precision": "fp32"}),
    ("vit-base-16", "vit-base-16", {}, {"batch": 128, "length": 1}),
    ("captioner", "captioner", {}, {"batch": 256, "length": 32}),
    # The following were added after the formulas were finished; nothing was fitted to them.
    ("gpt2-xl, checkpointed", "gpt2-xl", {}, {"batch": 8, "length": 1024, "checkpointing": True}),
    ("gpt2, ALiBi", "gpt2", {"positions": "alibi"}, {"batch": 8, "length": 1024}),
    ("gpt2, layers shared", "gpt2", {"share_layers": True}, {"batch": 8, "length": 512}),
    ("t5-v1.1-small, geglu", "t5-v1.1-small", {}, {"batch": 32, "length": 256, "source_length": 128}),
    ("llama, q and k normed", "llama-1b", {**LLAMA, "qk_norm": True}, {"batch": 4, "length": 1024}),
    (
        "llama, window, checkpointed",
        "llama-1b",
        {**LLAMA, "window": 256},
        {"batch": 16, "length": 1024, **CHECKPOINTED},
    ),
    ("bert, reference with dropout", "bert-base", CLASSIFY, {"batch": 16, "length": 256, "attention": "reference"}),
    ("transformer-big, Muon", "transformer-big", {}, {"batch": 64, "length": 64, "optimiser": "muon"}),
    ("sentiment", "sentiment", {}, {"batch": 512, "length": 128}),
    ("swin-tiny", "swin-tiny", {}, {"batch": 256, "length": 1}),
    ("captioner-regions, fp32", "captioner-regions", {}, {"batch": 256, "length": 32, "precision": "fp32"}),
]
SMALL = {"n_layers": 2, "d_model": 64, "n_heads": 4, "d_ff": 256, "vocab_size": 512}


def cases(small: bool) -> list[tuple[str, ModelConfig, Setting]]:
    """The configurations, or ``small`` versions of them for a CPU."""
    found = []
    for name, preset, changes, how in CASES:
        fields = {**PRESETS[preset], **changes}
        if small:
            kv = {"n_kv_heads": 1 if fields["n_kv_heads"] == 1 else 2} if fields.get("n_kv_heads") else {}
            fields = {**fields, **SMALL, **kv, "window": 16 if fields.get("window") else None, "max_len": 512}
            if fields.get("source") == "image":
                fields |= {"image_size": 32, "patch_size": 8}
            how = {**how, "batch": 2, "length": min(how["length"], 64), "source_length": None}
            how |= {"precision": "bf16" if how.get("precision") == "fp16" else how.get("precision", "bf16")}
        backend = "reference" if how.get("attention") == "reference" else "auto"
        config = ModelConfig(**{**fields, "attention_backend": backend})
        working = not small and how.get("precision", "bf16") == "bf16"  # as runs on one GPU have it
        found.append((name, config, Setting(**how, working=working)))
    return found


def random_batch(config: ModelConfig, setting: Setting, device: torch.device) -> Batch:
    """A random batch like those of the tasks, without padding."""
    shape = (setting.batch, setting.length)
    targets = torch.randint(3, config.output_vocab_size, shape)
    if config.head == "classify":
        targets = torch.randint(0, config.n_classes, shape[:1])
    elif setting.counted < 1:
        n = round(setting.counted * setting.length)
        targets[:, n:] = IGNORE
    text = torch.randint(3, config.vocab_size, shape)
    options: dict[str, Tensor] = {}
    if config.architecture == "decoder":
        inputs: tuple[Tensor, ...] = (text,)
    elif config.source == "image":
        pixels = torch.rand(setting.batch, config.n_channels, config.image_size, config.image_size)
        inputs = (pixels,) if config.architecture == "encoder" else (pixels, text)
    elif config.source == "regions":
        places = source_places(config, setting.length, setting.source_length)
        inputs = (torch.rand(setting.batch, places, config.d_region + config.d_box), text)
    elif config.architecture == "encoder":
        inputs, options = (text,), {"padding_mask": torch.ones(shape, dtype=torch.bool)}
    else:
        length = source_places(config, setting.length, setting.source_length)
        source = torch.randint(3, config.vocab_size, (setting.batch, length))
        inputs, options = (source, text), {"source_padding_mask": torch.ones(source.shape, dtype=torch.bool)}
    return Batch(inputs, targets, options).to(device)


class Step:
    """A training step like that of ``training.loop``, stage by stage."""

    def __init__(self, config: ModelConfig, setting: Setting, device: torch.device) -> None:
        torch.manual_seed(0)
        self.setting = setting
        self.train = TrainConfig(optimiser=setting.optimiser, precision=setting.precision)
        self.model: Model = build(config, device=device)
        self.model.use_checkpointing(setting.checkpointing)
        self.objective = Objective(self.model, setting.smoothing).train()
        self.precision = Precision(setting.precision, device)
        self.working = WorkingWeights(self.objective) if setting.working else None
        self.optimiser: Optimiser = build_optimiser(self.model, self.train)
        self.ema = Ema(self.model, 0.999) if setting.ema else None
        self.batch = random_batch(config, setting, device)

    def forward(self) -> Tensor:
        objective = self.objective if self.working is None else self.working.objective
        with self.precision.forward():
            return objective(self.batch) * (1 / max(1, self.batch.n_targets))

    def backward(self, loss: Tensor) -> None:
        self.precision.backward(loss)
        if self.working is not None:
            self.working.hand_over_gradients()

    def update(self) -> None:
        self.precision.unscale(self.optimiser.optimisers)
        clip_grad_norm(self.objective.parameters(), self.train.clip)
        self.optimiser.set_lr(0.01)
        self.precision.step(self.optimiser.optimisers)
        self.optimiser.zero_grad()
        if self.working is not None:
            self.working.refresh()
        if self.ema is not None:
            self.ema.update()

    def whole(self) -> None:
        self.backward(self.forward())
        self.update()

    def tensors(self) -> list[Tensor]:
        state = list(self.optimiser.state_tensors().values())
        ema = [] if self.ema is None else list(self.ema._averages.values())
        inputs = [*self.batch.inputs, self.batch.targets, *self.batch.options.values()]
        working = [] if self.working is None else list(self.working.objective.parameters())
        return [*self.model.parameters(), *self.model.buffers(), *working, *state, *ema, *inputs]


def measure_on_gpu(config: ModelConfig, setting: Setting, device: torch.device) -> dict[str, Any]:
    """Bytes on the device after each stage, at the peaks of the three stages, and at the peak of the whole step."""
    found: dict[str, Any] = {}
    base = torch.cuda.memory_allocated()
    step = Step(config, setting, device)
    found["built"] = torch.cuda.memory_allocated() - base
    step.whole()  # optimiser state, library workspaces
    torch.cuda.synchronize()
    gc.collect()
    found["before"] = torch.cuda.memory_allocated()

    def stage(name: str) -> None:
        torch.cuda.synchronize()
        found[f"after_{name}"] = torch.cuda.memory_allocated()
        found[f"peak_{name}"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    loss = step.forward()
    stage("forward")
    step.backward(loss)
    stage("backward")
    step.update()
    stage("step")
    found["seconds"] = time.perf_counter() - started
    found["peak"] = max(found["peak_forward"], found["peak_backward"], found["peak_step"])
    del loss
    try:  # tracing must not fail the measurement
        found["at_peak"] = [] if setting.checkpointing else allocations_at_peak(step)
        found["sdpa"] = sdpa_choice(config, setting, device)
        if not setting.checkpointing:
            found["saved"], entries = saved_bytes(step.forward, step.tensors())
            found["saved_tensors"] = group_tensors(entries)
    except (RuntimeError, TypeError, KeyError, SystemError) as error:
        print(f"not traced: {type(error).__name__}: {error}")
    return found


def group_tensors(entries: list[tuple[tuple[int, ...], str, int]], most: int = 40) -> list[list[Any]]:
    """Group equal saved tensors: shape, dtype, bytes of one, number, total bytes."""
    counts = Counter(entries)
    rows = [[list(shape), dtype, size, n, size * n] for (shape, dtype, size), n in counts.items()]
    return sorted(rows, key=lambda row: -row[-1])[:most]


def allocations_at_peak(step: Step, most: int = 45) -> list[list[Any]]:
    """The allocations of another step that were live at its peak: source lines, bytes of one, number, total bytes."""
    torch.cuda.memory._record_memory_history(max_entries=400_000, stacks="python")
    step.whole()
    torch.cuda.synchronize()
    trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    now = highest = 0
    alive: dict[int, tuple[int, str]] = {}
    best: dict[int, tuple[int, str]] = {}
    for event in trace:
        if event["action"] == "alloc":
            alive[event["addr"]] = (event["size"], source_lines(event.get("frames", [])))
            now += event["size"]
            if now > highest:
                highest, best = now, dict(alive)
        elif event["action"] == "free_completed" and event["addr"] in alive:
            now -= alive.pop(event["addr"])[0]
    counts = Counter(best.values())
    rows = [[place, size, n, size * n] for (size, place), n in counts.items()]
    return [["all", highest, 1, highest], *sorted(rows, key=lambda row: -row[-1])[:most]]


def source_lines(frames: list[dict[str, Any]]) -> str:
    """The innermost lines of regard on the stack, and the innermost of all."""
    ours = [f"{Path(f['filename']).name}:{f['line']}" for f in frames if "regard" in f["filename"]]
    last = f"{Path(frames[0]['filename']).name}:{frames[0]['line']} {frames[0]['name']}" if frames else "backward"
    return f"{' < '.join(ours[:3])} [{last}]"


def sdpa_choice(config: ModelConfig, setting: Setting, device: torch.device) -> str:
    """The kernel that torch chooses for heads of this shape."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[setting.precision]
    heads, kv = config.n_heads, config.n_kv_heads or config.n_heads
    q, k, v = (
        torch.zeros(2, n, 64, config.head_width, device=device, dtype=dtype, requires_grad=True)
        for n in (heads, kv, kv)
    )
    names = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
    drop = config.attention_dropout
    plain = torch._fused_sdp_choice(q, k, v, None, drop, True, enable_gqa=heads != kv)
    mask = torch.ones(2, 1, 1, 64, dtype=torch.bool, device=device)
    masked = torch._fused_sdp_choice(q, k, v, mask, drop, False, enable_gqa=heads != kv)
    return f"causal {names.get(plain, plain)}, padding {names.get(masked, masked)}"


def measure_on_cpu(config: ModelConfig, setting: Setting, device: torch.device) -> dict[str, Any]:
    """The same by counting live tensors; a rough check, since CPU kernels save other tensors than those of a GPU."""
    step = Step(config, setting, device)
    step.whole()
    live = LiveBytes(step.tensors())
    found: dict[str, Any] = {"built": live.now, "before": live.now}
    with live:
        loss = step.forward()
        found["after_forward"], found["peak_forward"] = live.now, live.peak
        step.backward(loss)
        found["after_backward"], found["peak_backward"] = live.now, live.peak
        live.peak = live.now
        step.update()
        found["after_step"], found["peak_step"] = live.now, live.peak
    del loss
    found["peak"] = max(found["peak_forward"], found["peak_backward"], found["peak_step"])
    if not setting.checkpointing:
        found["saved"], entries = saved_bytes(step.forward, step.tensors())
        found["saved_tensors"] = group_tensors(entries)
    return found


def workspace(device: torch.device) -> int:
    """Bytes that the matrix library keeps after its use in the threads of forward and backward."""
    before = torch.cuda.memory_allocated()
    x = torch.zeros(256, 256, device=device, requires_grad=True)
    w = torch.zeros(256, 256, device=device, requires_grad=True)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            y = torch.nn.functional.linear(x, w, w[0]) @ w
        y.float().sum().backward()
    torch.cuda.synchronize()
    del x, w, y
    gc.collect()
    return torch.cuda.memory_allocated() - before


def report_lines(name: str, expected: TrainingMemory, found: dict[str, Any], unit: float) -> list[str]:
    """The comparison for one configuration, as lines."""

    def row(what: str, predicted: float | None, measured: float | None) -> str:
        numbers = ["-" if x is None else f"{x / unit:10.3f}" for x in (predicted, measured)]
        ratio = f"{predicted / measured:6.3f}" if predicted and measured else ""
        return f"  {what:<18}{numbers[0]:>12}{numbers[1]:>12}  {ratio}"

    static = expected.weights + expected.optimiser + expected.ema + expected.inputs + expected.workspace
    lines = [f"== {name}   ({found.get('sdpa', '')}, {found.get('seconds', 0):.2f} s)   predicted, measured, ratio"]
    lines += [
        row("before", static, found["before"]),
        row("after forward", expected.after_forward, found["after_forward"]),
        row("peak forward", expected.peak_forward, found["peak_forward"]),
        row("peak backward", expected.peak_backward, found["peak_backward"]),
        row("after backward", static + expected.gradients, found["after_backward"]),
        row("peak step", expected.peak_step, found["peak_step"]),
        row("saved", sum(expected.by_part.values()) + expected.copies, found.get("saved")),
        row("PEAK", expected.peak, found["peak"]),
    ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="small models and batches")
    parser.add_argument("--out", type=Path, default=Path("runs/memory"))
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device, unit = torch.device(args.device), 2.0**20 if args.small else GIB
    rows: list[dict[str, Any]] = []
    library = 0
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        library = workspace(device)
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, library workspace {library / 2**20:.1f} MiB")
    for name, config, setting in cases(args.small):
        if args.only not in name:
            continue
        if device.type == "cpu":
            setting = Setting(**{**vars(setting), "workspace": 0})
        expected = training_memory(config, parameter_groups(config), setting)
        row = {"name": name, "setting": vars(setting), "model": config.model_dump(exclude_defaults=True)}
        try:
            if device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
                left = torch.cuda.memory_allocated() - library
                if left > 2**20:  # they would be counted with this configuration
                    raise RuntimeError(f"{left} bytes are left from the previous configuration")
            found = (measure_on_gpu if device.type == "cuda" else measure_on_cpu)(config, setting, device)
        except Exception as error:
            print(f"== {name}: {type(error).__name__}: {str(error)[:300]}")
            traceback.print_exc()
            rows.append({**row, "error": str(error)[:300]})
            continue
        print("\n".join(report_lines(name, expected, found, unit)), flush=True)
        for entry in found.get("at_peak", [])[:14]:
            print(f"      {entry[3] / unit:9.3f} = {entry[2]} × {entry[1] / unit:.4f}  {entry[0]}")
        predicted = {**vars(expected), "peak": expected.peak, "where": expected.where}
        rows.append({**row, "predicted": predicted, "measured": found, "ratio": expected.peak / found["peak"]})
        document = {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "workspace": library,
            "rows": rows,
        }
        (args.out / "memory.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    (args.out / "memory.md").write_text(markdown(rows, unit), encoding="utf-8")
    print((args.out / "memory.md").read_text(encoding="utf-8"))


def markdown(rows: list[dict[str, Any]], unit: float) -> str:
    """The table of docs/cost.md."""
    lines = ["| configuration | batch × length | predicted | measured | ratio |", "|---|---|---:|---:|---:|"]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['name']} | | | {row['error'][:60]} | |")
            continue
        setting = row["setting"]
        size = f"{setting['batch']} × {setting['length']}"
        predicted, measured = row["predicted"]["peak"] / unit, row["measured"]["peak"] / unit
        lines.append(f"| {row['name']} | {size} | {predicted:.2f} | {measured:.2f} | {row['ratio']:.3f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
