"""Equal to what others compute, to 1e-5 in fp32: torch, transformers, and the papers' formulas as plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import Additive, Concat, Dot, General, MultiHeadAttention, XLRelative, attend, masks
from regard.attention.biases import Alibi, T5Bias
from regard.attention.masks import Mask
from regard.layers import Rope

BACKENDS = ["reference", "tiled", "sdpa", "flex", "auto"]
B, T, M, H = 2, 7, 24, 4


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def forward(module: nn.Module, *args: Any, **options: Any) -> Any:
    with torch.no_grad():
        return module.eval()(*args, **options)


def randomise(module: nn.Module) -> None:
    """Biases too, which most modules start at 0."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)


@torch.no_grad()
def copy_into(ours: MultiHeadAttention, w: dict[str, Tensor], b: dict[str, Tensor] | None = None) -> None:
    """Weights and biases named q, k, v, o, into the joined matrices."""
    for name in "qkv":
        getattr(ours, f"w_{name}").copy_(w[name])
    ours.w_o.weight.copy_(w["o"])
    if b is None:
        return
    if ours.cross:
        ours.w_query.bias.copy_(b["q"])
        ours.w_kv.bias.copy_(torch.cat([b["k"], b["v"]]))
    else:
        ours.w_qkv.bias.copy_(torch.cat([b["q"], b["k"], b["v"]]))
    if "o" in b:
        ours.w_o.bias.copy_(b["o"])


def additive_mask(mask: Mask | None, n_queries: int, n_batch: int = B) -> Tensor | None:
    """A mask as transformers takes it: (B, 1, T, S) of 0 and the lowest number there is."""
    if mask is None:
        return None
    allowed = mask.dense(n_queries, n_batch=n_batch)
    return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)


# ---- torch


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_scaled_dot_product_attention(backend: str, causal: bool, groups: int) -> None:
    q, k, v = torch.randn(B, H, 33, 16), torch.randn(B, groups, 33, 16), torch.randn(B, groups, 33, 16)
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    close(attend(q, k, v, mask=masks.causal() if causal else None, backend=backend).output, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scaled_dot_product_attention_with_mask_bias_and_scale(backend: str) -> None:
    q, k, v = torch.randn(B, H, 5, 8), torch.randn(B, H, 9, 8), torch.randn(B, H, 9, 8)
    bias, allowed = torch.randn(1, H, 5, 9), torch.rand(B, 1, 5, 9) < 0.7
    allowed[..., 0] = True  # where torch and we agree: every query sees a key
    wanted = F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias.masked_fill(~allowed, -math.inf), scale=0.3, dropout_p=0.0
    )
    close(attend(q, k, v, mask=allowed, bias=bias, scale=0.3, backend=backend).output, wanted)


def torch_and_ours(**options: Any) -> tuple[nn.MultiheadAttention, MultiHeadAttention]:
    theirs = nn.MultiheadAttention(M, H, batch_first=True, **options)
    randomise(theirs)
    cross = "kdim" in options
    ours = MultiHeadAttention(M, H, cross=cross, d_memory=options.get("kdim"))
    joined = theirs.in_proj_weight
    w = joined.chunk(3) if joined is not None else (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight)
    b = theirs.in_proj_bias.chunk(3)
    copy_into(
        ours,
        {**dict(zip("qkv", w, strict=True)), "o": theirs.out_proj.weight},
        {**dict(zip("qkv", b, strict=True)), "o": theirs.out_proj.bias},
    )
    return theirs, ours


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
def test_multihead_attention_of_torch(backend: str, causal: bool) -> None:
    (theirs, ours), x = torch_and_ours(), torch.randn(B, T, M)
    ours.backend = backend
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1) if causal else None
    wanted, _ = forward(theirs, x, x, x, attn_mask=hidden)
    close(forward(ours, x, mask=masks.causal() if causal else None), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_multihead_attention_of_torch_with_padding(backend: str) -> None:
    (theirs, ours), x, lengths = torch_and_ours(), torch.randn(B, T, M), torch.tensor([T, 4])
    ours.backend = backend
    wanted, _ = forward(theirs, x, x, x, key_padding_mask=torch.arange(T) >= lengths[:, None])
    close(forward(ours, x, mask=masks.padding(lengths)), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_multihead_attention_of_torch_across_widths_and_lengths(backend: str) -> None:
    theirs, ours = torch_and_ours(kdim=10, vdim=10)
    ours.backend = backend
    x, memory = torch.randn(B, T, M), torch.randn(B, 11, 10)
    close(forward(ours, x, memory), forward(theirs, x, memory, memory)[0])


def test_weights_and_gradients_of_multihead_attention_of_torch() -> None:
    (theirs, ours), x = torch_and_ours(), torch.randn(B, T, M)
    x_a, x_b = x.clone().requires_grad_(), x.clone().requires_grad_()
    wanted, weights = theirs(x_a, x_a, x_a, average_attn_weights=False)
    found = ours(x_b)
    upstream = torch.randn_like(found)
    wanted.backward(upstream)
    found.backward(upstream)
    close(x_b.grad, x_a.grad)
    close(ours.w_qkv.weight.grad, theirs.in_proj_weight.grad)
    q, k, v = (h.transpose(1, 2) for h in ours.w_qkv(x).unflatten(-1, (3 * H, -1)).split(H, dim=2))
    close(attend(q, k, v, weights=True).weights, weights)


# ---- transformers, with random weights


@pytest.mark.parametrize("backend", BACKENDS)
def test_gpt2(backend: str) -> None:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    config = GPT2Config(n_embd=M, n_head=H, n_positions=32, attn_pdrop=0.0, resid_pdrop=0.0)
    config._attn_implementation = "eager"
    theirs = GPT2Attention(config, layer_idx=0)
    randomise(theirs)
    ours = MultiHeadAttention(M, H, backend=backend)
    w, b = theirs.c_attn.weight.T.chunk(3), theirs.c_attn.bias.chunk(3)  # a Conv1D holds its matrix transposed
    copy_into(
        ours,
        {**dict(zip("qkv", w, strict=True)), "o": theirs.c_proj.weight.T},
        {**dict(zip("qkv", b, strict=True)), "o": theirs.c_proj.bias},
    )
    x = torch.randn(B, T, M)
    wanted = forward(theirs, x, attention_mask=additive_mask(masks.causal(), T))[0]
    close(forward(ours, x, mask=masks.causal()), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_llama(backend: str, n_kv_heads: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=M, num_attention_heads=H, num_key_value_heads=n_kv_heads, head_dim=8, max_position_embeddings=64
    )
    config._attn_implementation = "eager"
    theirs = LlamaAttention(config, layer_idx=0)
    randomise(theirs)
    ours = MultiHeadAttention(
        M, H, n_kv_heads, d_head=8, qkv_bias=False, out_bias=False, rope=Rope(8, base=10000.0), backend=backend
    )
    copy_into(ours, {name: getattr(theirs, f"{name}_proj").weight for name in "qkvo"})
    x = torch.randn(B, T, M)
    turn = LlamaRotaryEmbedding(config)(x, torch.arange(T)[None])
    wanted = forward(theirs, x, position_embeddings=turn, attention_mask=additive_mask(masks.causal(), T))[0]
    close(forward(ours, x, mask=masks.causal()), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decoder", [False, True])
def test_t5(backend: str, decoder: bool) -> None:
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    length = 40  # past the exact buckets, past max_distance
    config = T5Config(
        d_model=M,
        d_kv=8,
        num_heads=H,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        is_decoder=decoder,
    )
    config._attn_implementation = "eager"
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    randomise(theirs)
    bias = T5Bias(H, n_buckets=8, max_distance=20, bidirectional=not decoder)
    ours = MultiHeadAttention(
        M, H, d_head=8, qkv_bias=False, out_bias=False, position_bias=bias, mechanism=Dot(scale=1.0), backend=backend
    )
    copy_into(ours, {name: getattr(theirs, name).weight for name in "qkvo"})
    with torch.no_grad():
        bias.w.copy_(theirs.relative_attention_bias.weight)
    x, mask = torch.randn(B, length, M), masks.causal() if decoder else None
    wanted = forward(theirs, x, mask=additive_mask(mask, length))[0]
    close(forward(ours, x, mask=mask), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bert(backend: str) -> None:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertSelfAttention

    config = BertConfig(hidden_size=M, num_attention_heads=H, attention_probs_dropout_prob=0.0)
    config._attn_implementation = "eager"
    theirs = BertSelfAttention(config)
    randomise(theirs)
    ours = MultiHeadAttention(M, H, backend=backend)
    linears = {"q": theirs.query, "k": theirs.key, "v": theirs.value}
    copy_into(  # BERT's output projection is another module: the unit matrix stands in for it
        ours,
        {**{name: linear.weight for name, linear in linears.items()}, "o": torch.eye(M)},
        {**{name: linear.bias for name, linear in linears.items()}, "o": torch.zeros(M)},
    )
    x, padding = torch.randn(B, T, M), masks.padding(torch.tensor([T, 3]))
    wanted = forward(theirs, x, attention_mask=additive_mask(padding, T))[0]
    close(forward(ours, x, mask=padding), wanted)


# ---- papers, as loops


def sinusoid(distance: int, width: int) -> Tensor:
    """R of Transformer-XL: sines, then cosines, of distance / 10000^(2i/M)."""
    rates = [1 / 10000 ** (2 * i / width) for i in range(width // 2)]
    return torch.tensor([math.sin(distance * r) for r in rates] + [math.cos(distance * r) for r in rates])


@pytest.mark.parametrize("backend", ["reference", "tiled", "auto"])
@pytest.mark.parametrize("memory", [0, 3])
def test_transformer_xl(backend: str, memory: int) -> None:
    """Dai et al. 2019, §3.3, term by term: (a) content, (b) content-position, (c) and (d) the global u and v."""
    d = M // H
    bias = XLRelative(H, d, d_model=M)
    randomise(bias)
    q, k, v = torch.randn(1, H, T, d), torch.randn(1, H, T + memory, d), torch.randn(1, H, T + memory, d)
    wanted = torch.zeros(1, H, T, d)
    with torch.no_grad():
        for h in range(H):
            w_r = bias.w_r[h * d : (h + 1) * d]
            for i in range(T):
                own = i + memory  # the position of query i: keys of the memory come first
                scores = []
                for j in range(own + 1):
                    r = w_r @ sinusoid(own - j, M)
                    terms = q[0, h, i] @ k[0, h, j], q[0, h, i] @ r, bias.u[h] @ k[0, h, j], bias.v[h] @ r
                    scores.append(sum(terms) / math.sqrt(d))
                weights = torch.stack(scores).softmax(0)
                wanted[0, h, i] = weights @ v[0, h, : own + 1]
        close(attend(q, k, v, mask=masks.causal(), bias=bias, backend=backend).output, wanted)


def loop_over(score: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as Bahdanau and Luong write it: for each decoder state, for each encoder state, one score."""
    b, h, t, _ = q.shape
    rows = []
    for batch in range(b):
        for head in range(h):
            for i in range(t):
                scores = torch.stack([score(head, q[batch, head, i], key) for key in k[batch, head]])
                rows.append(scores.softmax(0) @ v[batch, head])
    return torch.stack(rows).view(b, h, t, -1)


@pytest.mark.parametrize("backend", ["reference", "tiled", "auto"])
@pytest.mark.parametrize("steps", [1, 4])
def test_bahdanau(backend: str, steps: int) -> None:
    """Bahdanau et al. 2015, eq. 6, with states of different widths; one step is an RNN decoder's."""
    q, k, v = torch.randn(B, 2, steps, 5), torch.randn(B, 2, 6, 3), torch.randn(B, 2, 6, 3)
    m = Additive(2, d_query=5, d_key=3, d_hidden=7)
    with torch.no_grad():
        wanted = loop_over(lambda h, s, key: m.v[h] @ torch.tanh(m.w_q[h].T @ s + m.w_k[h].T @ key), q, k, v)
        close(attend(q, k, v, mechanism=m, backend=backend).output, wanted)


@pytest.mark.parametrize("backend", ["reference", "tiled", "auto"])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("kind", ["dot", "general", "concat"])
def test_luong(backend: str, steps: int, kind: str) -> None:
    """Luong et al. 2015, §3.1: score(h_t, h_s) in its three forms."""
    q, k, v = torch.randn(B, 2, steps, 5), torch.randn(B, 2, 6, 5), torch.randn(B, 2, 6, 5)
    general, concat = General(2, 5), Concat(2, 5, d_hidden=7)
    mechanism, score = {
        "dot": (Dot(scale=1.0), lambda h, t, s: t @ s),
        "general": (general, lambda h, t, s: t @ general.w[h] @ s),
        "concat": (concat, lambda h, t, s: concat.v[h] @ torch.tanh(concat.w[h].T @ torch.cat([t, s]))),
    }[kind]
    with torch.no_grad():
        close(attend(q, k, v, mechanism=mechanism, backend=backend).output, loop_over(score, q, k, v))


@pytest.mark.parametrize("mask", [None, masks.causal()], ids=str)
def test_sinks_and_a_bias_under_autocast(mask: Mask | None) -> None:
    """On a CPU, sdpa computes short bf16 rows that train in fp32, with the bias in the same dtype."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 8, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    options: dict[str, Any] = {"mask": mask, "bias": Alibi(4), "sinks": torch.linspace(-1, 1, 4)}
    with torch.autocast("cpu", torch.bfloat16):
        outputs = [attend(q, k, v, backend=backend, **options).output for backend in ("sdpa", "reference")]
    torch.testing.assert_close(*outputs, atol=2e-2, rtol=2e-2)
