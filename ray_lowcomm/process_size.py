"""What a process takes of memory that has no model yet. Loads nothing of this package."""

from pathlib import Path

from torch import nn

# of a worker of Ray Train before there is a model, with torch, pyarrow and this package: where none can be measured
PROCESS = 470 << 20
CLIENT = 14 << 20  # of Ray's, in a process that Ray has started, beside what importing it takes
CODE = 56 << 20  # of forward, backward, exchange and checkpoint, packed matrices, the heap's holes


def process_bytes() -> int:
    """Resident memory of this process with what training loads, as Linux gives it; PROCESS elsewhere. For a process
    that trains nothing itself, and has loaded the data and the runtime."""
    import torch.distributed.fsdp  # much of what is loaded; the optimizer's first call loads the rest

    layer = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.zeros(1, 8)).sum().backward()
    optimizer.step()
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return PROCESS + CODE
    return CODE + next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:")), PROCESS)
