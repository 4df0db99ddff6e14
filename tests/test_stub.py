"""patrickstar/_C.pyi names what the extension has, with the same arguments."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import patrickstar
from patrickstar import _C

STUB = Path(patrickstar.__file__).with_name("_C.pyi")
CUDA_ONLY = re.compile(r"collective\.(make_)?(nccl|cuda)_|optim\.cuda_")
DUNDERS = {"__init__", "__enter__", "__exit__"}


def is_public(name):
    return not name.startswith("_") or name in DUNDERS


def stub_names(body, prefix=""):
    """{qualified name: (named arguments, number of arguments) of a function, or None}."""
    names = {}
    for node in body:
        if isinstance(node, ast.ClassDef) and is_public(node.name):
            names[prefix + node.name] = None
            if any(isinstance(base, ast.Name) and base.id == "_Enum" for base in node.bases):
                names[f"{prefix}{node.name}.__init__"] = (["value"], 1)
            names |= stub_names(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.AnnAssign) and is_public(node.target.id):
            names[prefix + node.target.id] = None
        elif isinstance(node, ast.FunctionDef) and is_public(node.name):
            is_property = any(isinstance(item, ast.Name) and item.id == "property" for item in node.decorator_list)
            positional = [arg.arg for arg in node.args.posonlyargs if arg.arg != "self"]
            named = [arg.arg for arg in [*node.args.args, *node.args.kwonlyargs] if arg.arg != "self"]
            names[prefix + node.name] = None if is_property else (named, len(positional) + len(named))
    return names


def signature(function):
    """(named arguments, number of arguments) as pybind11 writes them on a docstring's first line."""
    first = (function.__doc__ or "").partition("\n")[0]
    match = re.match(r"\w+\((.*)\) -> ", first)
    if match is None:
        return None
    text = match.group(1)
    while re.search(r"\[[^\[\]]*\]", text):  # type arguments hold commas of their own
        text = re.sub(r"\[[^\[\]]*\]", "", text)
    arguments = [item.split(":")[0].split("=")[0].strip() for item in text.split(",") if item.strip()]
    arguments = [name for name in arguments if name not in ("self", "*", "/", "**kwargs")]
    if arguments[:1] == ["arg0"] and re.match(r"arg0: handle|arg0: _C\.", text):
        arguments = arguments[1:]
    return [name for name in arguments if not re.fullmatch(r"arg\d+", name)], len(arguments)


def module_names(owner, prefix=""):
    names = {}
    for name, value in vars(owner).items():
        if not is_public(name) or (name in ("name", "value") and hasattr(owner, "__members__")):
            continue
        if name == "__init__" and signature(value) is None:
            continue  # a class that Python cannot make
        if inspect.ismodule(value) or inspect.isclass(value):
            names[prefix + name] = None
            if not (inspect.isclass(value) and issubclass(value, BaseException)):
                names |= module_names(value, f"{prefix}{name}.")
        elif isinstance(value, staticmethod):
            names[prefix + name] = signature(value.__func__)
        else:
            names[prefix + name] = signature(value) if callable(value) else None
    return names


@pytest.fixture(scope="module")
def both():
    return module_names(_C), stub_names(ast.parse(STUB.read_text()).body)


def test_every_name_of_the_module_is_in_the_stub(both):
    module, stub = both
    assert sorted(set(module) - set(stub)) == []


def test_every_name_of_the_stub_is_in_the_module(both):
    module, stub = both
    if _C.build_info()["cuda"] is None:
        stub = {name for name in stub if not CUDA_ONLY.match(name)}
    assert sorted(set(stub) - set(module)) == []


def test_arguments_are_the_same(both):
    module, stub = both
    checked = 0
    for name, arguments in module.items():
        if arguments is not None and stub.get(name) is not None:
            named, count = stub[name]
            # An argument without a name in C++ is positional only in the stub.
            assert (named, count) == arguments, f"{name}: stub {stub[name]}, module {arguments}"
            checked += 1
    print(f"compared the arguments of {checked} functions")
    assert checked > 50
