"""Plant known faults in the sources, one at a time, and see whether the tests notice.

    python tests/faults.py                   # all of them; exits with 1 if one is missed
    python tests/faults.py window seed       # those whose name contains one of the words
    python tests/faults.py --markdown        # the table for docs/architecture.md

Each fault replaces one piece of text in one file of a copy of the tree and runs the tests that ought to fail. A fault
whose text is no longer there is an error: whoever changes the code moves the fault along.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Fault(NamedTuple):
    name: str
    file: str  # below src/regard
    original: str
    planted: str
    tests: str  # what to run, separated by spaces: first where the fault is likely to show, then the whole folder


FAULTS = [
    Fault(
        "scale of the dot product left out",
        "attention/mechanisms.py",
        "return 1.0 / math.sqrt(d_head) if",
        "return 1.0 if",
        "tests/attention/test_biases.py tests/attention",
    ),
    Fault(
        "gradient of the scores scaled twice",
        "attention/mechanisms.py",
        "d_q = by_head(d_scores @ k, q.shape[1]) * scale",
        "d_q = by_head(d_scores @ k, q.shape[1]) * scale * scale",
        "tests/attention/test_biases.py tests/attention",
    ),
    Fault(
        "causal mask sees one key ahead",
        "attention/masks.py",
        "return at.j <= at.i\n",
        "return at.j <= at.i + 1\n",
        "tests/attention/test_masks.py tests/attention",
    ),
    Fault(
        "window one key too wide",
        "attention/masks.py",
        "return (at.j > at.i - self.size) &",
        "return (at.j >= at.i - self.size) &",
        "tests/attention/test_masks.py tests/attention",
    ),
    Fault(
        "block plan skips a block of the window",
        "attention/masks.py",
        "some = (box.j_max > box.i_min - self.size)",
        "some = (box.j_max > box.i_min - self.size + 64)",
        "tests/attention/test_tiled_plan.py tests/attention",
    ),
    Fault(
        "cache slot remembers the next position",
        "attention/cache/static_cache.py",
        "self._slots.write(torch.where(stays, new % n_slots, n_slots), new, k, v)",
        "self._slots.write(torch.where(stays, new % n_slots, n_slots), new + 1, k, v)",
        "tests/attention/test_cache.py tests/attention tests/generation",
    ),
    Fault(
        "truncated cache keeps one token too many",
        "attention/cache/kv_cache.py",
        "self._k, self._v = self._k[:, :, :length], self._v[:, :, :length]",
        "self._k, self._v = self._k[:, :, : length + 1], self._v[:, :, : length + 1]",
        "tests/attention/test_cache.py tests/attention tests/generation",
    ),
    Fault(
        "dropout does not rescale what it keeps",
        "attention/tiled.py",
        ".to(call.q.dtype) / (1 - call.dropout)",
        ".to(call.q.dtype)",
        "tests/attention/test_dropout.py tests/attention",
    ),
    Fault(
        "log-sum-exp without its maximum",
        "attention/tiled.py",
        'torch.where(seen, top + torch.log(total), float("inf"))',
        'torch.where(seen, torch.log(total), float("inf"))',
        "tests/attention/test_biases.py tests/attention",
    ),
    Fault(
        "softmax gradient without the row term",
        "attention/tiled.py",
        "d_weights.sub_(row_dot[:, :, rows]).mul_(weights)",
        "d_weights.mul_(weights)",
        "tests/attention/test_biases.py tests/attention",
    ),
    Fault(
        "entropy of a map drops the block's own maximum",
        "attention/attention_map.py",
        "out[:, :, rows] -= f * plogp + p_sum * torch.xlogy(f, f)",
        "out[:, :, rows] -= f * plogp",
        "tests/attention/test_map.py tests/attention",
    ),
    Fault(
        "ALiBi slopes doubled",
        "attention/biases.py",
        "return -self.slopes.view(",
        "return -2 * self.slopes.view(",
        "tests/attention/test_biases.py tests/attention tests/parity",
    ),
    Fault(
        "T5 bucket border off by one",
        "attention/biases.py",
        "far = (exact + (ratio",
        "far = (exact + 1 + (ratio",
        "tests/attention/test_biases.py tests/attention tests/parity/test_t5.py",
    ),
    Fault(
        "RoPE turns the wrong way in one half",
        "layers/rope.py",
        "first * cos - second * sin",
        "first * cos + second * sin",
        "tests/layers/test_rope.py tests/layers",
    ),
    Fault(
        "sinusoids of another width",
        "layers/positions.py",
        "exponents = 2.0 * pair / self.d_model",
        "exponents = 2.0 * pair / (self.d_model + 2)",
        "tests/layers/test_positions.py tests/layers",
    ),
    Fault(
        "LayerNorm ignores eps",
        "layers/norms.py",
        "F.layer_norm(x, (self.d,), self.weight, self.bias, self.eps)",
        "F.layer_norm(x, (self.d,), self.weight, self.bias, 1e-3)",
        "tests/layers/test_norms.py tests/layers",
    ),
    Fault(
        "post-norm block does not normalise",
        "models/block.py",
        "return SublayerNorms(total=norm)",
        "return SublayerNorms()",
        "tests/models/test_blocks.py tests/models",
    ),
    Fault(
        "cross-attention sees padding",
        "models/block.py",
        "return self.cross_attention(x, states, mask=mask, cache=cache)",
        "return self.cross_attention(x, states, mask=None, cache=cache)",
        "tests/models/test_padding.py tests/models",
    ),
    Fault(
        "label smoothing over V − 1 classes",
        "training/loss.py",
        "d_logits -= smoothing / logits.shape[-1]",
        "d_logits -= smoothing / (logits.shape[-1] - 1)",
        "tests/training/test_loss.py",
    ),
    Fault(
        "ignored targets push a gradient",
        "training/loss.py",
        "return total, d_logits.mul_(counts[:, None])",
        "return total, d_logits",
        "tests/training/test_loss.py",
    ),
    Fault(
        "Noam decays as 1/step",
        "training/optimiser.py",
        "min((warmup / step) ** 0.5, step / warmup)",
        "min(warmup / step, step / warmup)",
        "tests/training/test_schedule.py",
    ),
    Fault(
        "accumulated batches weighed alike",
        "training/loop.py",
        "self.group.world / max(1, self.at.n_targets))",
        "self.group.world / max(1, batch.n_targets * self.train.accumulate))",
        "tests/training/test_loop.py tests/training",
    ),
    Fault(
        "weight decay on norms and biases",
        "training/optimiser.py",
        'if not role.decays], "weight_decay": 0.0}',
        'if not role.decays], "weight_decay": train.weight_decay}',
        "tests/training/test_optimiser.py",
    ),
    Fault(
        "moving average keeps the wrong share",
        "training/averaging.py",
        "weights, 1 - decay)",
        "weights, decay)",
        "tests/training/test_averaging.py",
    ),
    Fault(
        "seed of the run ignored",
        "training/loop.py",
        'stable_key("training", stream, seed, number)',
        'stable_key("training", stream, 0, number)',
        "tests/training/test_loop.py tests/training",
    ),
    Fault(
        "every batch drops the same units",
        "training/loop.py",
        'stable_key("training", stream, seed, number)',
        'stable_key("training", stream, seed, 0)',
        "tests/training/test_loop.py tests/training",
    ),
    Fault(
        "a loss that is not finite goes on",
        "training/loop.py",
        "if not finite_loss or not (finite_norm or may_skip):",
        "if False:",
        "tests/training/test_loop.py tests/training/test_runs.py",
    ),
    Fault(
        "every epoch in the same order",
        "data/batching.py",
        'stable_key("batches", plan.seed, epoch)',
        'stable_key("batches", plan.seed, 0)',
        "tests/data/test_batching.py tests/data",
    ),
    Fault(
        "packed target crosses into the next document",
        "data/packing.py",
        "min(start + skipped + n + 1, end)",
        "min(start + skipped + n + 1, len(self.file.tokens))",
        "tests/data/test_batching.py tests/data",
    ),
    Fault(
        "masked LM masks 90 % of the chosen",
        "data/batching.py",
        "chosen & (action < 0.8)",
        "chosen & (action < 0.9)",
        "tests/data/test_batching.py tests/data",
    ),
    Fault(
        "split seed ignored",
        "data/splits.py",
        'stable_keys(("split", options.split_seed), map(key_of',
        'stable_keys(("split", 0), map(key_of',
        "tests/data/test_files.py tests/data",
    ),
    Fault(
        "manifest does not compare checksums",
        "hub/manifest.py",
        "if _entry(path) != entry:",
        "if False:",
        "tests/hub/test_manifest.py tests/hub tests/training/test_checkpoint.py",
    ),
    Fault(
        "a link may lead out of a directory",
        "foundation/files.py",
        "if not (real.is_relative_to(home) or real.is_relative_to(blobs)):",
        "if False:",
        "tests/hub/test_directory.py tests/hub",
    ),
    Fault(
        "fused weights split in the wrong order",
        "hub/weight_steps.py",
        "out[ours] = torch.cat([out.pop(part) for part in parts if part is not None])",
        "out[ours] = torch.cat([out.pop(part) for part in reversed(parts) if part is not None])",
        "tests/hub/test_steps.py tests/hub tests/parity/test_llama.py",
    ),
    Fault(
        "rows of a GGUF's keys stay in halves",
        "hub/gguf_file.py",
        '[("attn_q", n_heads), ("attn_k", n_kv_heads)]',
        '[("attn_q", n_heads)]',
        "tests/export/test_gguf.py",
    ),
    Fault(
        "int8 scale per matrix instead of per row",
        "layers/quantised_linear.py",
        "scale = weight.abs().amax(1) / _MAX_INT8",
        "scale = weight.abs().amax().expand(len(weight)) / _MAX_INT8",
        "tests/generation/test_fast_int8.py tests/generation tests/layers",
    ),
    Fault(
        "a text may end without its terms",
        "generation/constrained_search.py",
        "done = [x for x in banks[0][:k] if",
        "done = [x for x in options[:k] if",
        "tests/generation/test_glossary.py tests/generation",
    ),
    Fault(
        "beam length penalty inverted",
        "generation/generation_config.py",
        "base**self.length_penalty",
        "base**-self.length_penalty",
        "tests/generation/test_beam.py tests/generation",
    ),
    Fault(
        "beam search stops while a beam may improve",
        "generation/beam_search.py",
        "(best / penalty[:, None] > worst)",
        "(best / penalty[:, None] < worst)",
        "tests/generation/test_beam.py tests/generation",
    ),
    Fault(
        "a captured pass keeps the factor of the pass it was captured in",
        "training/gradient_pass.py",
        "self._factor.fill_(factor)",
        "self._factor.fill_(1.0)",
        "tests/training/test_gradient_pass.py tests/training/test_working_weights.py",
    ),
    Fault(
        "a beam keeps its own past instead of its parent's",
        "generation/step_keys.py",
        "torch.where(past, self.origin.index_select(0, rows), self.row[:n, None])",
        "torch.where(past, self.origin[:n], self.row[:n, None])",
        "tests/generation/test_cuda_graph.py tests/generation",
    ),
    Fault(
        "nucleus keeps the complement",
        "generation/sampling.py",
        "cumsum(-1) <= 1 - p",
        "cumsum(-1) <= p",
        "tests/generation/test_filters.py tests/generation",
    ),
    Fault(
        "repetition penalty rewards",
        "generation/sampling.py",
        "torch.where(scores < 0, scores * penalty, scores / penalty)",
        "torch.where(scores > 0, scores * penalty, scores / penalty)",
        "tests/generation/test_filters.py tests/generation",
    ),
    Fault(
        "seed of sampling ignored",
        "generation/sampling.py",
        "manual_seed((seed + copy",
        "manual_seed((0 + copy",
        "tests/generation/test_generate.py tests/generation",
    ),
    Fault(
        "rollout mixes up residual and attention",
        "attention/readings.py",
        "flow = residual * flow + (1 - residual) * through.mean(1)",
        "flow = (1 - residual) * flow + residual * through.mean(1)",
        "tests/attention/test_readings.py tests/attention tests/lens",
    ),
    Fault(
        "weights of a token's experts swapped",
        "models/experts.py",
        "weights, experts = probabilities.topk(self.k, dim=-1)",
        "weights, experts = probabilities.topk(self.k, dim=-1)[0].flip(-1), probabilities.topk(self.k, dim=-1)[1]",
        "tests/parity/test_successors.py tests/models/test_experts.py",
    ),
    Fault(
        "gradient of sorted tokens goes to their neighbours",
        "models/experts.py",
        "rows = gradients[0][ctx.saved_tensors[0]]",
        "rows = gradients[0]",
        "tests/models/test_experts.py",
    ),
    Fault(
        "state carried between chunks without its decay",
        "attention/state_space.py",
        "log_kept = total[..., -1].double()",
        "log_kept = 0 * total[..., -1].double()",
        "tests/models/test_mamba.py",
    ),
    Fault(
        "a text that moves to another slot sees what was there",
        "generation/slot_engine.py",
        "self.visible[to], self.ends[to] = self.visible[slot], end",
        "self.ends[to] = end",
        "tests/serving/test_batching.py tests/serving",
    ),
    Fault(
        "joint searches count their steps together",
        "generation/joint_search.py",
        "beams.select(mask), beams.step[mask]",
        "beams.select(mask), beams.step[mask].amax().expand(int(mask.sum())).clone()",
        "tests/serving/test_batching.py tests/serving",
    ),
    Fault(
        "server answers any Host",
        "web/requests.py",
        "if len(host) != 1 or not self._is_own_host(host[0]):",
        "if len(host) != 1:",
        "tests/web/test_limits.py tests/web",
    ),
    Fault(
        "bodies without an announced length are not limited",
        "web/requests.py",
        "if len(body) > limits.body_bytes:",
        "if False:",
        "tests/web/test_limits.py tests/web",
    ),
    Fault(
        "a key may ask as often as it likes",
        "web/api_keys.py",
        "is_allowed = left >= 1",
        "is_allowed = True",
        "tests/serving/test_operations.py",
    ),
    Fault(
        "a stream begins anew with another replica",
        "serving/resumed_stream.py",
        "n_letters = self._sent.letters[index] - self._seen.letters[index]",
        "n_letters = 0",
        "tests/serving/test_ray_replicas.py",
    ),
    Fault(
        "bootstrap p-value may be 0",
        "training/metrics/statistics.py",
        "p_value=(1 + as_far) / (1 + samples)",
        "p_value=as_far / samples",
        "tests/training/test_metrics.py tests/training",
    ),
]


def unplantable(faults: Sequence[Fault] = FAULTS) -> list[str]:
    """Faults whose original text does not stand exactly once in its file."""
    texts = {fault.file: (ROOT / "src/regard" / fault.file).read_text(encoding="utf-8") for fault in faults}
    return [fault.name for fault in faults if texts[fault.file].count(fault.original) != 1]


def first_failure(output: str) -> str | None:
    """The first test that failed."""
    failed = [line.split()[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0] if failed else None


Find = Callable[[str], str | None]  # what to tell of pytest's output; None where every test passed


def run_tests(fault: Fault, tree: Path, options: Sequence[str] = (), find: Find = first_failure) -> str:
    """Plant a fault in a copy of the tree and tell what fails, or "missed"."""
    file = tree / "src/regard" / fault.file
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(fault.original, fault.planted), encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options]
    try:
        for tests in fault.tests.split():  # one after the other: pytest would put overlapping paths in its own order
            ran = subprocess.run([*pytest, tests], cwd=tree, env=environment, capture_output=True, text=True)
            if (found := find(ran.stdout)) is not None:
                return found
            if ran.returncode != 0:
                output = f"{ran.stdout[-2000:]}{ran.stderr[-2000:]}"
                raise RuntimeError(f"{fault.name}: pytest ended with {ran.returncode}\n{output}")
    finally:
        file.write_text(text, encoding="utf-8")
    return "missed"


def plant(faults: list[Fault], workers: int, options: Sequence[str], find: Find) -> dict[str, str]:
    """Every fault's name and what caught it; each worker has a copy of the tree to itself."""
    trees: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(workers):
            ignored = shutil.ignore_patterns(".*", "runs", "out", "__pycache__")
            trees.put(Path(shutil.copytree(ROOT, Path(folder) / f"tree-{number}", ignore=ignored)))

        def run_one(fault: Fault) -> tuple[str, str]:
            tree = trees.get()
            try:
                caught_by = run_tests(fault, tree, options, find)
            finally:
                trees.put(tree)
            print(f"{fault.name}: {caught_by}", file=sys.stderr, flush=True)
            return fault.name, caught_by

        with ThreadPoolExecutor(workers) as pool:
            return dict(pool.map(run_one, faults))


def report(
    faults: Sequence[Fault], caught_by: str = "caught by", options: Sequence[str] = (), find: Find = first_failure
) -> None:
    """The command line: plant the faults that are asked for, print the table, exit with 1 if one is missed."""
    parser = argparse.ArgumentParser(description="Plant known faults and see whether the tests notice.")
    parser.add_argument("words", nargs="*", help="only faults whose name contains one of these")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    if names := unplantable(faults):
        sys.exit(f"the sources have changed under these faults: {', '.join(names)}")
    chosen = [fault for fault in faults if not asked.words or any(word in fault.name for word in asked.words)]
    caught = plant(chosen, asked.workers, options, find)
    if asked.markdown:
        print(f"| fault | file | {caught_by} |\n|---|---|---|")
    for fault in chosen:
        by = caught[fault.name]
        shown = by if by == "missed" or find is not first_failure else f"`{by}`"
        print(f"| {fault.name} | `{fault.file}` | {shown} |" if asked.markdown else f"{by:>60}  {fault.name}")
    missed = sum(by == "missed" for by in caught.values())
    print(f"\n{len(chosen) - missed} of {len(chosen)} planted faults caught")
    sys.exit(missed > 0)


if __name__ == "__main__":
    report(FAULTS)
