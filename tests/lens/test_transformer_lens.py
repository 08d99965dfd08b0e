"""The same weights here and in transformer-lens: activations by name, logit attribution, induction, composition."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import regard
from regard.lens.activations import ActivationRecord
from regard.lens.head_weights import composition_scores, ov_circuit, qk_circuit

pytest.importorskip("transformer_lens", reason="needs transformer-lens: pip install transformer-lens==4.3.0")

SIZES = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2}
# Their names of a layer's activations and ours. Theirs have heads behind positions.
NAMES = {
    "hook_resid_pre": "input",
    "ln1.hook_out": "attention.input",
    "attn.hook_rot_q": "attention.q",
    "attn.hook_rot_k": "attention.k",
    "attn.hook_v": "attention.v",
    "attn.hook_z": "attention.heads",
    "hook_attn_out": "attention.output",
    "hook_resid_mid": "after_attention",
    "ln2.hook_out": "ff.input",
    "mlp.hook_post": "ff.neurons",
    "hook_mlp_out": "ff.output",
    "hook_resid_post": "output",
}


class Both(NamedTuple):
    """One set of weights, and one pass of it, in both libraries."""

    model: Any
    record: ActivationRecord
    bridge: Any
    tokens: Tensor


@pytest.fixture(params=["gpt2", "llama"], scope="module")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    from transformer_lens.model_bridge import TransformerBridge

    folder = tmp_path_factory.mktemp("weights") / request.param
    _save(request.param, folder)
    generator = torch.Generator().manual_seed(0)
    words = torch.randperm(58, generator=generator)[:10] + 3
    tokens = torch.cat((words, words))[None]
    model = regard.load(folder)
    bridge = TransformerBridge.boot_transformers(str(folder), device="cpu")
    return Both(model, regard.capture(model, tokens), bridge, tokens)


def _save(name: str, folder: Path) -> None:
    """A tiny model of random weights, norms and biases too, and a tokenizer of numbers."""
    import transformers
    from tokenizers import Tokenizer, models

    if name == "gpt2":
        config: Any = transformers.GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=4, **SIZES)
    else:
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=48, max_position_embeddings=64, **heads, **SIZES
        )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(n): n for n in range(61)}, unk_token="0"))
    special = {"bos_token": "1", "eos_token": "2", "pad_token": "2"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def _cache(both: Both) -> tuple[Tensor, Any]:
    with torch.no_grad():
        return both.bridge.run_with_cache(both.tokens)


def test_activations_are_theirs_by_name(both: Both) -> None:
    logits, cache = _cache(both)
    torch.testing.assert_close(both.record.logits, logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(both.record.norm_scale("final_states"), cache["ln_final.hook_scale"][..., 0])
    for layer in range(2):
        for name, own in NAMES.items():
            key = f"blocks.{layer}.{name}"
            theirs = cache[key if key in cache else key.replace("rot_", "")]  # GPT-2 rotates nothing
            theirs = theirs.transpose(1, 2) if theirs.dim() == 4 else theirs
            torch.testing.assert_close(both.record[f"decoder.blocks.{layer}.{own}"], theirs, atol=1e-5, rtol=1e-4)
        for name, own in (("ln1", "attention.input"), ("ln2", "ff.input")):
            theirs = cache[f"blocks.{layer}.{name}.hook_scale"][..., 0]
            torch.testing.assert_close(both.record.norm_scale(f"decoder.blocks.{layer}.{own}"), theirs)
        weights = both.record.attention(layer=layer).tile()
        torch.testing.assert_close(weights, cache[f"blocks.{layer}.attn.hook_pattern"], atol=1e-5, rtol=1e-4)


def test_induction_scores_are_theirs(both: Both) -> None:
    from transformer_lens.head_detector import get_induction_head_detection_pattern

    cache, pairs = _cache(both)[1], get_induction_head_detection_pattern(both.tokens)
    n_rows = int((pairs.sum(-1) > 0).sum())  # ours is the mean of the rows that have such a key
    expected = torch.stack([(cache["pattern", layer][0] * pairs).sum((-1, -2)) / n_rows for layer in range(2)])
    found = regard.look(both.model, both.tokens[0].tolist()).patterns().induction
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_logit_attribution_is_theirs(both: Both) -> None:
    _fold_norms(both)
    cache = _cache(both)[1]
    stack, labels = cache.get_full_resid_decomposition(pos_slice=-1, return_labels=True, expand_neurons=False)
    with torch.no_grad():
        parts = cache.logit_attrs(stack, torch.tensor(7), torch.tensor(9), pos_slice=-1)[:, 0]
    theirs = dict(zip(labels, parts.tolist(), strict=True))
    found = both.record.logit_attribution(7, against=9)
    split = found.splits[0][1]
    ours = {"embed": found.parts["token"], "pos_embed": found.parts.get("position", torch.tensor(0.0))}
    ours |= {f"L{n}H{h}": found.parts["self"][n, h] for n in range(2) for h in range(4)}
    for layer in range(2):  # theirs has the network's bias in it
        bias = both.model.decoder.blocks[layer].ff.w_out.bias
        extra = 0 if bias is None else (split.readouts[f"decoder.blocks.{layer}.ff"] @ bias.double())[0]
        ours[f"{layer}_mlp_out"] = found.parts["ff"][layer] + extra
    for name, part in ours.items():
        assert theirs.get(name, 0.0) == pytest.approx(float(part.detach()), abs=1e-4), name


def test_circuits_in_the_weights_and_their_composition_are_theirs(both: Both) -> None:
    _fold_norms(both)
    with torch.no_grad():
        qk, ov = both.bridge.QK, both.bridge.OV
        for layer, head in ((0, 1), (1, 3)):
            for theirs, ours in (
                (qk, qk_circuit(both.model, layer, head)),
                (ov, ov_circuit(both.model, layer, head)),
            ):
                torch.testing.assert_close(ours.dense(), theirs[layer, head].AB, atol=1e-4, rtol=1e-3)
                torch.testing.assert_close(ours.svd[1], theirs[layer, head].S, atol=1e-4, rtol=1e-3)
        for reader in ("q", "k", "v"):
            expected = both.bridge.all_composition_scores(reader.upper()).scores
            torch.testing.assert_close(composition_scores(both.model, reader), expected, atol=1e-4, rtol=1e-3)


def _fold_norms(both: Both) -> None:
    """Their way to make norms part of the weights, which logit attribution needs; once."""
    if not both.bridge.compatibility_mode:
        ours = {"fold_value_biases": False, "center_unembed": False, "center_writing_weights": False}
        both.bridge.enable_compatibility_mode(disable_warnings=True, **ours)
