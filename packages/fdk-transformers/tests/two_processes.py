"""Trains LoRA on a quantised model in two processes, and compares with one.

python two_processes.py RANK FOLDER RENDEZVOUS_FILE
"""

import sys

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

STEPS = 4


def make(folder):
    """Loads the model with adapters, the same in each process."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))


def train(model, ids):
    """Trains; returns the loss of each step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(parameters, lr=1.0)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def shard(model):
    """Shards a model by FSDP2, layer by layer."""
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    return fully_shard(model)


def work(rank, folder, rendezvous):
    """Runs in each process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    ids = torch.arange(4 * 8).view(4, 8) % 100 + 6
    wanted = train(make(folder), ids)
    for name, parallel in {"ddp": DistributedDataParallel, "fsdp2": shard}.items():
        losses = train(parallel(make(folder)), ids[2 * rank : 2 * rank + 2])
        dist.all_reduce(losses)
        torch.testing.assert_close(losses / 2, wanted, rtol=1e-4, atol=1e-4)
        assert losses[-1] < losses[0]
        print(name, "equal", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    work(int(sys.argv[1]), *sys.argv[2:])
