import ast
import importlib.util
from pathlib import Path

import pytest

import patrickstar

ROOT = Path(__file__).resolve().parents[2]
STUB = Path(patrickstar.__file__).with_name("_C.pyi").read_text()


def load_tool():
    spec = importlib.util.spec_from_file_location("make_stub", ROOT / "tools" / "make_stub.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


TOOL = load_tool()


def test_the_stub_is_the_extensions():
    declarations = TOOL.flat(TOOL.made())
    functions = [node for node in declarations.values() if isinstance(node, ast.FunctionDef)]
    print(f"compared {len(declarations)} declarations, {len(functions)} of them functions and properties")
    assert TOOL.differences(STUB) == []
    assert len(declarations) > 400
    assert len(functions) > 250


def test_the_extension_agrees_with_itself():
    made = "\n".join(ast.unparse(node) for node in TOOL.made())
    assert TOOL.differences(made) == []


_REST_OF_UPDATE = ',\n    ) -> None:\n        """One'
EDITS = {
    "a function is missing": ("def num_available_cpus() -> int:", "def _num_available_cpus() -> int:"),
    "a function too many": ("UNLIMITED: int\n", "UNLIMITED: int\ndef surplus() -> None: ...\n"),
    "a method is missing": ("    def trim(self) -> None: ...\n", ""),
    "a member is missing": ("    BFLOAT16 = 1\n", ""),
    "another value of a member": ("    BFLOAT16 = 1\n", "    BFLOAT16 = 2\n"),
    "an attribute is missing": ("    prefetches_far: bool\n", ""),
    "a constant is missing": ("    SQUARES_BLOCK: ClassVar[int]\n", ""),
    "a special method is missing": ("    def __enter__(self) -> None: ...\n", ""),
    "another base": ("class RankMismatch(StateError):", "class RankMismatch(RuntimeError):"),
    "a method in place of a property": ("    @property\n    def num_urgent(self)", "    def num_urgent(self)"),
    "an attribute that cannot be set": (
        "    prefetches_far: bool\n",
        "    @property\n    def prefetches_far(self) -> bool: ...\n",
    ),
    "an attribute that can be set": (
        "    @property\n    def quota_cpus(self) -> float:",
        "    quota_cpus: float\n    if 0:",
    ),
    "a method in place of a function": ("    @staticmethod\n    def isa()", "    def isa()"),
    "another name of a parameter": ("def parse_cpu_list(text: str)", "def parse_cpu_list(cpus: str)"),
    "another order": ("(topology: CpuTopology, options: H", "(options: HostThreadOptions, topology: H"),
    "a parameter is missing": ("def crc32c(data: Buffer, crc: int = 0)", "def crc32c(data: Buffer)"),
    "another number": ("num_failures: int = 0", "num_failures: int = 1"),
    "another default of an enum": ("= Priority.URGENT", "= Priority.BACKGROUND"),
    "a default that is not told": (
        "expected_groups: Sequence[AdamOptions | LionOptions | SgdOptions] = []",
        "expected_groups: Sequence[AdamOptions | LionOptions | SgdOptions] = ...",
    ),
    "no default": (
        'read_cpu_topology(cpus: Sequence[int], root: str = "")',
        "read_cpu_topology(cpus: Sequence[int], root: str)",
    ),
    "not keyword-only": ("        *,\n        runtime: Runtime,", "        runtime: Runtime,"),
    "keyword-only": ("def set_interrupt_waiting(waiting", "def set_interrupt_waiting(*, waiting"),
    "not positional-only": (
        "def bind_storage(self, chunk: int, storage: int, /)",
        "def bind_storage(self, chunk: int, storage: int)",
    ),
    "positional-only": ("def format_cpu_list(cpus: Sequence[int])", "def format_cpu_list(cpus: Sequence[int], /)"),
    "another type": ("def interleave_pages(data: int", "def interleave_pages(data: str"),
    "another element": ("def format_cpu_list(cpus: Sequence[int])", "def format_cpu_list(cpus: Sequence[str])"),
    "a wider type": ("def allowed_cpus() -> list[int]:", "def allowed_cpus() -> list:"),
    "not optional": ("observer: UseObserver | None = None", "observer: UseObserver = None"),
    "half of a union": ("ThreadPool | int" + _REST_OF_UPDATE, "ThreadPool" + _REST_OF_UPDATE),
    "Any for a type": ("def predicted_step(self) -> dict[str, Any] | None:", "def predicted_step(self) -> Any:"),
    "no type": ("def set_interrupt_delivery(function: Callable[[], object])", "def set_interrupt_delivery(function)"),
    "no docstring": ('    """The calling thread\'s affinity mask, ascending."""', "    ..."),
}


@pytest.mark.parametrize("before, after", EDITS.values(), ids=EDITS)
def test_a_difference_is_noticed(before, after):
    assert STUB.count(before) == 1
    found = TOOL.differences(STUB.replace(before, after))
    print(*found, sep="\n")
    assert found
