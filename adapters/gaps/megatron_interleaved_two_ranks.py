# /// script
# dependencies = ["megatron-core==0.16.1", "torch==2.13.0"]
#
# [tool.meshmark]
# title = "An interleaved schedule over two ranks mixes up activations and gradients"
# framework = "megatron-core"
# symptom = """
# Without overlap_p2p_comm, which nothing refuses, the loss is wrong and gradients are hundreds of times too
# large."""
# cause = """
# A batch of point-to-point operations has no tags: with two ranks, the previous and the next stage are one peer."""
# upstream = "https://github.com/NVIDIA/Megatron-LM/issues/1450"
# processes = 2
# ///
import sys

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import _batched_p2p_ops

dist.init_process_group("gloo")
peer = 1 - dist.get_rank()
from_previous, from_next = torch.zeros(()), torch.zeros(())
waits = _batched_p2p_ops(
    tensor_send_prev=torch.tensor(2.0),  # a gradient
    tensor_recv_prev=from_previous,
    tensor_send_next=torch.tensor(1.0),  # an activation
    tensor_recv_next=from_next,
    group=dist.group.WORLD,
    prev_pipeline_rank=peer,
    next_pipeline_rank=peer,
)
for wait in waits:
    wait.wait()
if (from_previous.item(), from_next.item()) != (1.0, 2.0):
    sys.exit(f"expected: activation 1 and gradient 2; got: {from_previous.item():g} and {from_next.item():g}")
