"""Two workers read each other's memory: `python examples/remote_memory.py`. It starts the second one itself.

The first is worker 0 of 2 and offers a block; the second, worker 1 of 4, reads the heads that it holds. What one
exports the other imports; here a ZeroMQ pair carries the bytes, and NATS or MPI would do.
"""

import subprocess
import sys

import torch
import zmq

from event_plane.memory_transport import MemoryPublisher
from event_plane.schema import producer_id
from kvbm_core.block import CompleteBlock
from kvbm_core.config import KvbmConfig
from kvbm_core.manager import KvBlockManager
from kvbm_core.remote import RemoteMemory, nixl_register
from kvbm_core.sequence import TokenBlockSequence

LAYERS = 2


def manager_of(rank: int, size: int) -> tuple[KvbmConfig, KvBlockManager]:
    config = KvbmConfig(
        layers=LAYERS, heads=8, head_dim=64, device_blocks=8, headroom_bytes=0, hash_secret="the same for all workers",
        tensor_parallel_rank=rank, tensor_parallel_size=size,
    )  # fmt: skip
    return config, KvBlockManager(config, MemoryPublisher(f"memory://{rank}", producer=producer_id(f"worker-{rank}")))


def owner() -> None:
    config, manager = manager_of(0, 2)
    block = TokenBlockSequence(config, "acme", range(16)).blocks[0]
    (place,) = manager.allocate(1).blocks
    for layer in range(LAYERS):  # each head holds its number in the model: this worker has 0 to 3
        manager.device.layer_view(place.index, layer)[:] = torch.arange(4, dtype=torch.float16)[:, None]
    (computed,) = manager.complete([place], [block])
    with manager.register(computed) as registered, zmq.Context() as context, context.socket(zmq.PAIR) as pair:
        port = pair.bind_to_random_port("tcp://127.0.0.1")
        with (
            subprocess.Popen([sys.executable, __file__, str(port)]) as reader,
            nixl_register(manager.own_tier("device"), config, name="worker-0-of-2") as registration,
            registration.block_set([registered]) as offered,
        ):
            pair.send(offered.export())
            reader.wait()
    manager.close()


def reader(port: str) -> None:
    config, manager = manager_of(1, 4)
    block = TokenBlockSequence(config, "acme", range(16)).blocks[0]
    with zmq.Context() as context, context.socket(zmq.PAIR) as pair:
        pair.connect(f"tcp://127.0.0.1:{port}")
        exported = pair.recv()
    with RemoteMemory(manager.own_tier("device"), config, name="worker-1-of-4") as memory:
        memory.import_(exported)
        remote = memory.get_remote_blocks_immutable([block.key])
        for outcome in memory.read(remote, manager.allocate(1).blocks):
            if isinstance(outcome, CompleteBlock):
                with manager.register(outcome) as found:
                    heads = manager.device.layer_view(found.index, LAYERS - 1)[0, 0, :, 0].tolist()
                    print(f"block {block.key.sequence_hash:032x}: heads {heads}")
            else:
                print(f"compute it: {outcome}")
    manager.close()


if __name__ == "__main__":
    reader(sys.argv[1]) if len(sys.argv) > 1 else owner()
