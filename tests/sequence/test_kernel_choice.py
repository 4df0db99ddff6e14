import dataclasses

import pytest
import torch

from patrickstar.sequence.kernel_choice import Device, Kernel, Question, choose
from patrickstar.sequence.masking import Cover

ON_CUDA = frozenset({Kernel.CUDNN, Kernel.FLASH, Kernel.EFFICIENT})
H200 = Device("cuda", (9, 0), 91900, ON_CUDA)
A100 = Device("cuda", (8, 0), 91900, ON_CUDA)
L40 = Device("cuda", (8, 9), 91900, ON_CUDA)
V100 = Device("cuda", (7, 0), 91900, ON_CUDA)
HOST = Device("cpu", (0, 0), 0, frozenset({Kernel.HOST}))
BLOCK = Question(torch.bfloat16, (128, 128), (4096, 8192), Cover.ALL, 0.0)


@pytest.mark.parametrize(
    ("device", "changes", "kernel"),
    [
        (H200, {}, Kernel.CUDNN),
        (H200, {"cover": Cover.DIAGONAL, "dtype": torch.float16}, Kernel.CUDNN),
        (H200, {"head_dims": (64, 128)}, Kernel.CUDNN),
        (H200, {"head_dims": (256, 256)}, Kernel.FLASH),
        (H200, {"lengths": (4096, 100)}, Kernel.FLASH),
        (dataclasses.replace(H200, cudnn=91400), {}, Kernel.FLASH),
        (dataclasses.replace(H200, enabled=ON_CUDA - {Kernel.CUDNN}), {}, Kernel.FLASH),
        (dataclasses.replace(H200, enabled=frozenset({Kernel.EFFICIENT})), {}, Kernel.EFFICIENT),
        (dataclasses.replace(H200, enabled=frozenset()), {}, Kernel.PLAIN),
        (H200, {"cover": Cover.SOME}, Kernel.EFFICIENT),
        (H200, {"head_dims": (192, 128)}, Kernel.EFFICIENT),
        (H200, {"dtype": torch.float32}, Kernel.EFFICIENT),
        (H200, {"dtype": torch.float32, "head_dims": (12, 12)}, Kernel.EFFICIENT),
        (H200, {"head_dims": (12, 12)}, Kernel.PLAIN),
        (H200, {"dtype": torch.float64}, Kernel.PLAIN),
        (H200, {"dropout_p": 0.1}, Kernel.PLAIN),
        (A100, {}, Kernel.FLASH),
        (A100, {"head_dims": (256, 256)}, Kernel.FLASH),
        (L40, {"head_dims": (256, 256)}, Kernel.EFFICIENT),
        (L40, {"head_dims": (192, 192)}, Kernel.FLASH),
        (V100, {"dtype": torch.float16}, Kernel.EFFICIENT),
        (V100, {}, Kernel.PLAIN),
        (HOST, {"dtype": torch.float64}, Kernel.HOST),
        (HOST, {"cover": Cover.DIAGONAL}, Kernel.HOST),
        (HOST, {"cover": Cover.SOME}, Kernel.PLAIN),
        (HOST, {"head_dims": (8, 16)}, Kernel.PLAIN),
        (HOST, {"dropout_p": 0.1}, Kernel.PLAIN),
        (Device("xpu", (0, 0), 0, frozenset()), {}, Kernel.PLAIN),
    ],
)
def test_choice(device, changes, kernel):
    assert choose(device, dataclasses.replace(BLOCK, **changes)) is kernel


def test_this_machine():
    assert Device.of(torch.zeros(1)) == HOST
    assert Device.of(torch.zeros(1, device="meta")).enabled == frozenset()
