"""What PyTorch's NCCL calls and its context parallelism take on the GPUs of one host, beside the benchmarks `collectives` and
`attention_scaling`. One JSON object a line, from rank 0.

    torchrun --nproc-per-node 2 benches/peers/distributed.py [collectives] [attention]

Run with `torch` 2.11. Collectives: bf16, mean of `--repeats` calls in a row, results allocated once. Attention: one document, causal, 16 heads of
128, forward and backward with a gradient of ones, mean of 8 steps in a row; `context_parallel` with FlashAttention 2, and the same on one GPU.
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel


def mean(call, repeats, warmup):
    for _ in range(warmup):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    # The slowest rank's time.
    seconds = torch.tensor(time.perf_counter() - start, device="cuda")
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item() / repeats, host / repeats


def say(rank, **values):
    if rank == 0:
        print(json.dumps(values), flush=True)


def collectives(rank, size, args):
    for mib in args.mib:
        len_ = (mib << 20) // 2 // size * size
        part = torch.randn(len_, device="cuda", dtype=torch.bfloat16)
        whole = torch.empty(len_ * size, device="cuda", dtype=torch.bfloat16)
        back = torch.empty_like(part)
        others = len_ * 2 * (size - 1)
        for op, call, num_bytes in [
            ("all_gather", lambda: dist.all_gather_into_tensor(whole, part), others),
            ("reduce_scatter", lambda: dist.reduce_scatter_tensor(back, whole), others),
            ("all_to_all", lambda: dist.all_to_all_single(back, part), others // size),
        ]:
            seconds, host = mean(call, args.repeats, 20)
            say(rank, peer="PyTorch", op=op, mib_per_rank=mib, world=size, us=round(seconds * 1e6, 1), host_us=round(host * 1e6, 1),
                busbw_gbs=round(num_bytes / seconds / 1e9, 1))


def attention(rank, size, args):
    mesh = init_device_mesh("cuda", (size,))

    def step(tensors):
        q, k, v = (x.detach().requires_grad_() for x in tensors)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out.backward(torch.ones_like(out))

    for tokens in args.tokens:
        torch.manual_seed(0)
        whole = [torch.randn(1, 16, tokens, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        one, _ = mean(lambda: step(whole), 8, 2)
        parts = [x.clone() for x in whole]
        with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 3):
            many, _ = mean(lambda: step(parts), 8, 2)
        say(rank, peer="PyTorch context_parallel", tokens=tokens, world=size, one_gpu_ms=round(one * 1e3, 3), ms=round(many * 1e3, 3),
            ratio=round(one / many, 3))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = lambda text: [int(number) for number in text.split(",")]
    parser.add_argument("what", nargs="*", help="collectives, attention; both if none is named")
    parser.add_argument("--mib", type=numbers, default=[1, 8, 64, 256, 1024], help="MiB of each rank")
    parser.add_argument("--repeats", type=int, default=100, help="timed calls")
    parser.add_argument("--tokens", type=numbers, default=[16384, 32768, 65536], help="lengths of the document")
    args = parser.parse_args()
    parts = {"collectives": collectives, "attention": attention}
    if unknown := set(args.what) - set(parts):
        parser.error(f"expected collectives or attention, got {', '.join(sorted(unknown))}")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    for name, part in parts.items():
        if not args.what or name in args.what:
            part(rank, size, args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
