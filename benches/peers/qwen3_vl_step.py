"""A training step of Qwen3-VL in PyTorch and transformers, beside the benchmark `train_step`. Prints one JSON object.

Run with `torch` 2.11 and `transformers` 5.17 on one GPU, with what `train_step` printed as `lengths`:

    python benches/peers/qwen3_vl_step.py --shape 2b --lengths 20000,12768 --image 16 --chunk 4096

The same step: weights drawn at random in bf16, one row of packed documents that start with an image each, forward, loss in chunks, backward, fused
AdamW. Attention of text and vision is `varlen_attn` (FlashAttention 2) over the documents and images; nothing of size tokens x tokens exists.
"""

import argparse
import inspect
import json
import time

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl import modeling_qwen3_vl

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # a try on a CPU
    varlen_attn = None

SHAPES = {
    # hidden, inner, layers, heads, kv_heads, head_dim, vocabulary; depth, width, inner and heads of the tower; sections; deepstack; ids
    "tiny": (64, 128, 2, 4, 2, 16, 512, 3, 32, 64, 2, [4, 2, 2], [0, 1], [500, 501, 502, 503]),
    "2b": (2048, 6144, 28, 16, 8, 128, 151936, 24, 1024, 4096, 16, [24, 20, 20], [5, 11, 17], [151655, 151656, 151652, 151653]),
}


def configuration(shape):
    hidden, inner, layers, heads, kv_heads, head_dim, vocab, depth, width, tower_inner, tower_heads, sections, deepstack, ids = SHAPES[shape]
    return Qwen3VLConfig(
        text_config=dict(
            vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=kv_heads, head_dim=head_dim, rms_norm_eps=1e-6, use_cache=False,
            rope_parameters=dict(rope_type="default", rope_theta=5e6, mrope_section=sections, mrope_interleaved=True),
        ),
        vision_config=dict(
            depth=depth, hidden_size=width, intermediate_size=tower_inner, num_heads=tower_heads, in_channels=3, patch_size=16,
            spatial_merge_size=2, temporal_patch_size=2, out_hidden_size=hidden, num_position_embeddings=2304,
            deepstack_visual_indexes=deepstack,
        ),
        image_token_id=ids[0], video_token_id=ids[1], vision_start_token_id=ids[2], vision_end_token_id=ids[3], tie_word_embeddings=True,
    )


def boundaries(lengths, device):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def flash_over(documents, frame, device):
    """Attention of transformers' signature: text over `documents`, vision over the boundaries that come with the call, of `frame` patches each."""
    text = boundaries(documents, device)
    has_gqa = varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters

    def attention(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, **_):
        is_text = cu_seq_lens_q is None
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        more = {}
        if q.shape[1] != k.shape[1]:
            if has_gqa:
                more["enable_gqa"] = True
            else:
                k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        cu = text if is_text else cu_seq_lens_q
        longest = max(documents) if is_text else frame
        out = varlen_attn(q, k, v, cu, cu, longest, longest, scale=scaling, window_size=(-1, 0) if is_text else (-1, -1), **more)
        return out[None], None

    return attention


def batch(config, lengths, side, device):
    """Ids, labels, positions `[3, 1, tokens]`, pixels and grids as `train_step` makes them."""
    merge = config.vision_config.spatial_merge_size
    side = -(-side // merge) * merge
    num_image = (side // merge) ** 2
    ids, labels, positions, grids = [], [], [], []
    for d, length in enumerate(lengths):
        image = num_image if 0 < num_image < length - 1 else 0
        document = [config.image_token_id if i < image else (d * 7919 + i * 104729) % min(config.image_token_id, config.vision_start_token_id) for i in range(length)]
        ids += document
        labels += [document[i + 1] if i + 1 < length and i + 1 >= image else -100 for i in range(length)]
        wide = side // merge
        height_width = [(0, i // wide, i % wide) for i in range(image)]
        start = wide if image else 0
        positions += height_width + [(start + i,) * 3 for i in range(length - image)]
        if image:
            grids.append([1, side, side])
    vision = config.vision_config
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = (torch.arange(len(grids) * side * side * width, device=device) * 7919 % 509 / 254.0 - 1.0).reshape(-1, width)
    tensor = lambda x: torch.tensor(x, device=device)
    return tensor(ids)[None], tensor(labels)[None], tensor(positions).T[:, None].contiguous(), pixels.bfloat16(), tensor(grids)


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--shape", choices=SHAPES, default="tiny")
    args.add_argument("--lengths", required=True, help="lengths of the packed documents, with commas between")
    args.add_argument("--image", type=int, default=16, help="side of a document's image in patches")
    args.add_argument("--chunk", type=int, default=4096, help="logits of how many tokens exist at a time")
    args.add_argument("--warmup", type=int, default=3)
    args.add_argument("--steps", type=int, default=3)
    args.add_argument("--attention", choices=["varlen", "sdpa"], default="varlen", help="sdpa: for one document, or a try on a CPU")
    args = args.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = [int(x) for x in args.lengths.split(",")]
    config = configuration(args.shape)
    if args.attention == "varlen":
        AttentionInterface.register("varlen", flash_over(lengths, args.image**2, device))
        # The tower hands over the boundaries of its images in one call.
        modeling_qwen3_vl.is_flash_attention_requested = lambda *_, **__: True
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3VLForConditionalGeneration._from_config(config, attn_implementation=args.attention, dtype=torch.bfloat16)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
    ids, labels, positions, pixels, grids = batch(config, lengths, args.image, device)
    num_labels = (labels != -100).sum()

    def chunk_loss(hidden, labels):
        return F.cross_entropy(model.lm_head(hidden).float(), labels, ignore_index=-100, reduction="sum")

    def step():
        media = dict(pixel_values=pixels, image_grid_thw=grids) if len(grids) else {}
        hidden = model.model(input_ids=ids, position_ids=positions, **media).last_hidden_state[0]
        parts = zip(hidden.split(args.chunk), labels[0].split(args.chunk))
        loss = sum(checkpoint(chunk_loss, *part, use_reentrant=False) for part in parts) / num_labels
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(args.warmup):
        loss = step()
    wait()
    began = time.perf_counter()
    for _ in range(args.steps):
        loss = step()
    wait()
    seconds = (time.perf_counter() - began) / args.steps
    memory = dict(allocated=torch.cuda.max_memory_allocated(), reserved=torch.cuda.max_memory_reserved()) if device == "cuda" else {}
    print(json.dumps(dict(
        peer="transformers", shape=args.shape, attention=args.attention, tokens=ids.shape[1], documents=len(lengths), ms_per_step=round(seconds * 1e3, 1),
        tokens_per_s=round(ids.shape[1] / seconds), loss=loss.item(), peak_gib={k: round(v / 2**30, 1) for k, v in memory.items()},
    )))


if __name__ == "__main__":
    main()
