"""Parts of the torch loops that decode.py and gpus.py time: compiled operations, and a step as a CUDA graph."""

import torch
import torch.nn.functional as F


@torch.compile
def norm(x):  # its weights are ones
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


@torch.compile
def rope(x, cos, sin):
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


@torch.compile
def act(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def graph_of(step, after_first=lambda: None):
    """A step as a CUDA graph, after three runs of it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(3):
            step()
            if i == 0:
                after_first()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def milliseconds(run):
    """The device's time of what a function launches."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
