import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import check_imports  # noqa: E402
import check_layers  # noqa: E402


def test_csrc_keeps_to_the_layers():
    assert check_layers.check(ROOT) == []


def plant(root, files):
    base = {"common/check.h": "#include <string>\n", "memory/arena.h": '#include "common/check.h"\n'}
    for name, text in (base | files).items():
        path = root / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return check_layers.check(root)


GUARDED = "#ifdef PATRICKSTAR_WITH_CUDA\n#include <cuda_runtime_api.h>\n#include <nccl.h>\n#endif\n"


@pytest.mark.parametrize(
    "files",
    [
        {"chunk/store.cpp": '#include "memory/arena.h"\n#include "chunk/store.h"\n', "chunk/store.h": ""},
        {"bind/module.cpp": "#include <nanobind/nanobind.h>\n"},
        {"backend/cuda_backend.cpp": "#include <cuda_runtime_api.h>\n"},
        {"collective/nccl_group.cpp": "#include <nccl.h>\n"},
        {"torch_shim/group.cpp": "#include <torch/extension.h>\n#include <c10/core/Device.h>\n"},
        {"engine/runtime.cpp": GUARDED},
        {"optim/kernels.cu": '#include <cuda_fp16.h>\n#include "common/check.h"\n'},
        {
            "optim/cpu_avx2.cpp": '#include <immintrin.h>\n#include "optim/body.inl"\n',
            "optim/body.inl": "#include <cstdint>\n",
        },
    ],
)
def test_what_is_allowed(tmp_path, files):
    assert plant(tmp_path, files) == []


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"memory/pool.cpp": '#include "chunk/store.h"\n', "chunk/store.h": ""}, "memory is layer 2 and chunk is 3"),
        ({"backend/cpu.cpp": '#include "memory/arena.h"\n'}, "backend and memory are siblings in layer 2"),
        (
            {"optim/kernels.h": '  #  include "trace/recorder.h"\n', "trace/recorder.h": ""},
            "optim and trace are siblings in layer 4",
        ),
        ({"storage/storage.h": ""}, "storage is no layer"),
        ({"loose.h": ""}, "is no layer"),
        ({"chunk/store.cpp": '#include "store.h"\n'}, "which is not in csrc"),
        ({"engine/runtime.cpp": "#include <torch/extension.h>\n"}, "the core is compiled without PyTorch"),
        ({"bind/module.cpp": "#include <ATen/ATen.h>\n"}, "the core is compiled without PyTorch"),
        ({"chunk/store.h": "#include <c10/core/StorageImpl.h>\n"}, "the core is compiled without PyTorch"),
        ({"optim/compute.cpp": "#include <nanobind/nanobind.h>\n"}, "Python is for bind/ alone"),
        ({"engine/runtime.cpp": "#include <cuda_runtime_api.h>\n"}, "#ifdef PATRICKSTAR_WITH_CUDA may"),
        ({"torch_shim/shim.cpp": "#include <c10/cuda/CUDAStream.h>\n"}, "#ifdef PATRICKSTAR_WITH_CUDA may"),
        ({"engine/a.cpp": f"{GUARDED}#include <nccl.h>\n"}, "#ifdef PATRICKSTAR_WITH_CUDA may"),
        ({"engine/a.cpp": "#ifndef PATRICKSTAR_WITH_CUDA\n#include <nccl.h>\n#endif\n"}, "PATRICKSTAR_WITH_CUDA may"),
        ({"optim/cpu_avx2.cpp": '#include "common/check.h"\n'}, "see [Note: ISA files]"),
    ],
)
def test_what_is_not(tmp_path, files, complaint):
    (violation,) = plant(tmp_path, files)
    assert complaint in violation
    assert violation.startswith("csrc/") and ":" in violation


def test_patrickstar_keeps_to_its_rooms():
    assert check_imports.check(ROOT) == []


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (
            {"module/hooks.py": "from patrickstar.session.session import Session\n"},
            "module is layer 2 and session is 5",
        ),
        ({"module/hooks.py": "def late():\n    import patrickstar.engine\n"}, "module is layer 2 and engine is 8"),
        (
            {"module/hooks.py": "if TYPE_CHECKING:\n    from patrickstar import engine\n"},
            "module/hooks.py:2: imports engine",
        ),
        ({"config/root.py": "from patrickstar.ranks import messages\n"}, "config and ranks are siblings in layer 0"),
        ({"session/session.py": "from patrickstar import zero\n"}, "zero is a name of users"),
        ({"loose.py": ""}, "loose is no room"),
        ({"zero.py": "from patrickstar.engine import engine\n", "engine/a.py": "from patrickstar import _C\n"}, None),
        (
            {"engine/a.py": "from patrickstar.config import Config\nfrom patrickstar.engine import b\nimport torch\n"},
            None,
        ),
    ],
)
def test_imports_between_rooms(tmp_path, files, complaint):
    for name, text in files.items():
        path = tmp_path / "patrickstar" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    violations = check_imports.check(tmp_path)
    assert len(violations) == (complaint is not None)
    if complaint is not None:
        assert complaint in violations[0]


@pytest.mark.parametrize(
    ("late", "complaint"),
    [
        ("from patrickstar.engine import a\n", "engine.a, engine.b import each other"),
        ("def late():\n    from patrickstar.engine.a import x\n", "engine.a, engine.b import each other"),
        ("if TYPE_CHECKING:\n    from patrickstar.engine.a import x\n", "import each other for types"),
        ("from patrickstar.engine import c\n", None),
    ],
)
def test_import_circles(tmp_path, late, complaint):
    folder = tmp_path / "patrickstar" / "engine"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("import patrickstar.engine.b\n")
    (folder / "b.py").write_text(late)
    (folder / "c.py").write_text("import torch\n")
    violations = check_imports.check(tmp_path)
    assert len(violations) == (complaint is not None)
    if complaint is not None:
        assert complaint in violations[0]
