"""What PyTorch's attention takes on one GPU, beside `attention_gpu only=hopper time`: the same cases, one JSON object a line.

    python3 benches/peers/attention.py

Run with `torch` 2.11. One document: cuDNN's attention; packed documents: `varlen_attn` (FlashAttention 2), which has no grouped heads, so that
key heads are repeated. bf16, causal. Medians of 20 synchronised calls behind 5 others, by CUDA events, which hold the host's launch as well.
"""

import json
import math
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn


def median(call):
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def lengths_of(total, mean):
    """As `attention_gpu` draws them, where no file of lengths lies beside it."""
    state, lengths, left = 1, [], total
    while left > 0:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        length = int(-math.log(((state >> 11) + 1) / 2**53) * mean)
        lengths.append(min(max(length, 16), left))
        left -= lengths[-1]
    return lengths


def random(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def say(peer, case, lengths, heads, head_dim, run, inputs):
    with torch.no_grad():
        forward = median(run)
    out = run()
    dout = torch.randn_like(out)
    backward = median(lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True))
    flops = 4 * heads * head_dim * sum(length**2 / 2 for length in lengths) / 1e9
    figures = dict(forward_ms=forward, backward_ms=backward, forward_tflops=flops / forward, backward_tflops=2.5 * flops / backward)
    print(json.dumps(dict(peer=peer, case=case) | {name: round(value, 4) for name, value in figures.items()}), flush=True)


def one_document(tokens, heads, kv_heads, head_dim):
    q, k, v = (random(1, number, tokens, head_dim) for number in (heads, kv_heads, kv_heads))

    def run():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)

    case = f"one document of {tokens}, heads ({heads}, {kv_heads}), head_dim {head_dim}"
    say("cuDNN", case, [tokens], heads, head_dim, run, (q, k, v))


def packed(total, mean, heads=16, head_dim=128):
    lengths = lengths_of(total, mean)
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    q, k, v = (random(total, heads, head_dim) for _ in range(3))
    longest = max(lengths)
    run = lambda: varlen_attn(q, k, v, ends, ends, longest, longest, window_size=(-1, 0))
    say("varlen_attn", f"{len(lengths)} documents in {total}, heads ({heads}, {heads}), head_dim {head_dim}", lengths, heads, head_dim, run, (q, k, v))


print(json.dumps(dict(torch=torch.__version__, gpu=torch.cuda.get_device_name(0), cudnn=torch.backends.cudnn.version())), flush=True)
for shape in [(8192, 16, 16, 128), (16384, 16, 16, 128), (8192, 32, 8, 128), (8192, 32, 32, 64)]:
    one_document(*shape)
for shape in [(32768, 2048), (32768, 8192), (65536, 4096), (65536, 1024), (65536, 64)]:
    packed(*shape)
