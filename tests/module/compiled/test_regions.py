import pytest
import torch
from torch import nn

from patrickstar.module.compiled.dynamo import make_compiler, without_wrappers
from patrickstar.module.compiled.regions import cut_compiled, cut_for
from tests.models import MODELS
from tests.module.compiled.forms import BACKEND, Tower


class Block(nn.Sequential):
    def __init__(self, width=8):
        super().__init__(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))


class Callable(nn.Module):
    def forward(self, x):
        return x


class Own(Callable):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))


class Stage(Callable):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.shrink = Block(4)


class Heads(Callable):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(Block(2) for _ in range(4))
        self.rest = nn.Linear(64, 64)


class Stages(Callable):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        self.stages = nn.Sequential(Stage(), Stage())
        self.top = nn.ModuleDict({"left": Heads(), "right": Heads()})
        self.activation = nn.GELU()
        self.layers = nn.ModuleList([nn.Linear(8, 8), Block()])
        self.head = nn.Linear(8, 8)


def names(module, **options):
    compiler = make_compiler({"backend": BACKEND, **options})
    known = {child: without_wrappers(name) for name, child in module.named_modules()}
    return [known[region.module] for region in cut_for(module, compiler).regions]


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (Tower, [f"blocks.{i}" for i in range(6)]),
        (
            Stages,
            [
                "stem",
                *(f"stages.{i}.blocks.{k}" if k < 3 else f"stages.{i}.shrink" for i in (0, 1) for k in range(4)),
                "top.left",
                "top.right",
                "layers.1",
            ],
        ),
        (lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), [""]),  # single layers are no blocks
        (lambda: nn.Sequential(Own(), Own()), ["0", "1"]),
        (lambda: nn.Linear(8, 8), [""]),
        (Heads, [f"heads.{i}" for i in range(4)]),  # at the top any list counts
        (
            MODELS["t5"].build,
            [
                *(f"encoder.block.{i}" for i in range(2)),
                "encoder.final_layer_norm",
                *(f"decoder.block.{i}" for i in range(2)),
                "decoder.final_layer_norm",
            ],
        ),
        (MODELS["mixture_of_experts"].build, [f"layers.{i}.experts.{k}" for i in range(3) for k in range(4)]),
        (MODELS["albert"].build, [""]),
    ],
)
def test_cut(build, expected):
    module = build()
    assert names(module) == expected
    assert names(module, fullgraph=True) == [""]


def test_compiled_already():
    module = Tower()
    module.blocks[1].compile(backend="eager")
    module.blocks[2] = torch.compile(module.blocks[2], backend=BACKEND)
    module.blocks[3].up.compile(backend=BACKEND)
    module.blocks[4] = torch.compiler.disable(module.blocks[4])
    module.blocks[5].compile(disable=True)
    found = cut_compiled(module)
    assert [region.module for region in found.regions] == [module.blocks[1], module.blocks[2], module.blocks[3].up]
    assert all(region.compiled for region in found.regions)
    whole = cut_compiled(torch.compile(module, backend=BACKEND))
    assert [region.module for region in whole.regions] == list(module.blocks)
    assert [region.compiled for region in whole.regions] == [False, True, True, False, False, False]
