"""Makes a stub from the extension patrickstar._C and compares patrickstar/_C.pyi with it.

    python tools/make_stub.py            # prints the stub that the extension yields
    python tools/make_stub.py --check    # prints the differences of patrickstar/_C.pyi; exits with 1 if there are any

Stub and extension must agree on names, kinds, bases and parameters (names, order, defaults, keyword-only and
positional-only markers). The stub's types must be equal or narrower. Everything with a docstring in the extension needs
one in the stub; its text may say more.

Types and names of positional-only parameters are handwritten, because nanobind's signatures lack them (its own stubgen
reads the same ones). There a dict or list built by C++ is a bare ``dict`` or ``list``, a callable or optional result is
an ``object``, and a parameter without ``nb::arg`` is ``arg0``. The CUDA part is missing unless compiled in.
"""

from __future__ import annotations

import argparse
import ast
import enum
import inspect
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from patrickstar import _C

STUB = Path(__file__).resolve().parent.parent / "patrickstar" / "_C.pyi"
# Names that an extension without the CUDA part lacks.
CUDA_ONLY = re.compile(r"collective\.(make_)?(nccl|cuda)_|(optim|quant|experts|fp8)\.cuda_")
# Names that every object has, or that only pickle calls.
NOT_LISTED = {*vars(object), "__getstate__", "__setstate__"} - {"__init__"}
SIGNATURE = re.compile(r"(\w*\(.*\) -> .*)\n*")


def signature(text: str | None) -> str | None:
    """Returns the signature at the start of nanobind's docstring, from the parenthesis on, with types as in a stub."""
    match = SIGNATURE.match(text or "")
    if match is None:
        return None
    line = re.sub(r"(?:\w+::)+(\w+)", r"\1", match.group(1))  # a class that is registered later than the function
    line = re.sub(r"\b(?:patrickstar\._C|collections\.abc|typing|typing_extensions)\.", "", line)
    return line[line.index("(") :]


def declared(source: str, text: str | None = None) -> ast.stmt:
    """Parses a declaration; adds the docstring in ``text``, without signature."""
    node = ast.parse(source).body[0]
    text = SIGNATURE.sub("", text or "", count=1).strip()
    if text:
        node.body.insert(0, ast.Expr(ast.Constant(text)))
    return node


def is_static(function: Any, owner: Any) -> bool:
    """True for a class's functions without ``self``, and for functions of submodules, which the stub has as classes."""
    return owner is not _C and type(function).__name__ == "nb_func"


def made(owner: Any = _C) -> list[ast.stmt]:
    """Returns the stub's body for a module or class of the extension."""
    body: list[ast.stmt] = []
    for name, value in vars(owner).items():
        is_dunder = name.startswith("__") and name.endswith("__")
        if name in NOT_LISTED or (name.startswith("_") and not is_dunder):
            continue
        if callable(value) and not inspect.isclass(value) and signature(value.__doc__):
            marker = "@staticmethod\n" * is_static(value, owner)
            body.append(declared(f"{marker}def {name}{signature(value.__doc__)}: ...", value.__doc__))
        elif isinstance(value, enum.Enum):
            body.append(declared(f"{name} = {value.value}"))
        elif isinstance(value, property):
            kind = signature(value.fget.__doc__).rpartition("-> ")[2]
            if value.fset is not None:
                body.append(declared(f"{name}: {kind}"))
            else:
                body.append(declared(f"@property\ndef {name}(self) -> {kind}: ...", value.__doc__))
        elif is_dunder:
            continue  # the __init__ of a class that Python cannot construct, or a standard attribute
        elif inspect.ismodule(value) or inspect.isclass(value):
            bases = [base.__name__ for base in getattr(value, "__bases__", ()) if base is not object]
            node = declared(f"class {name}({', '.join(bases)}): ...", value.__doc__)
            is_error = inspect.isclass(value) and issubclass(value, BaseException)
            body.append(node)
            node.body += [] if is_error else made(value)
        else:
            assert not callable(value), f"{name} has no signature"
            body.append(declared(("{}: {}" if owner is _C else "{}: ClassVar[{}]").format(name, type(value).__name__)))
    return body


def name_of(node: ast.ClassDef | ast.FunctionDef | ast.AnnAssign | ast.Assign) -> str:
    """Returns the name that a declaration declares."""
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0])
    return ast.unparse(node.target) if isinstance(node, ast.AnnAssign) else node.name


def flat(body: list[ast.stmt], prefix: str = "") -> dict[str, ast.stmt]:
    """Returns {qualified name: declaration}. A class includes declarations of its private bases, unknown to C++."""
    private = {node.name: node.body for node in body if isinstance(node, ast.ClassDef) and node.name.startswith("_")}
    names: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AnnAssign | ast.Assign):
            name = name_of(node)
            assert prefix + name not in names, f"{prefix}{name} is declared twice"
            if name not in private:
                names[prefix + name] = node
                if isinstance(node, ast.ClassDef):
                    inherited = [item for base in node.bases for item in private.get(ast.unparse(base), [])]
                    names |= flat([*inherited, *node.body], f"{prefix}{name}.")
    return names


def shape(node: ast.stmt) -> tuple[str, list[ast.expr | None]]:
    """Returns the text in which two declarations must agree, and their types."""
    if isinstance(node, ast.ClassDef):
        return f"class({', '.join(base for base in map(ast.unparse, node.bases) if not base.startswith('_'))})", []
    if isinstance(node, ast.AnnAssign):
        return "attribute", [node.annotation]
    if isinstance(node, ast.Assign):
        return f"member {ast.unparse(node.value)}", []
    args, words, types = node.args, [], [node.returns]
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + args.defaults + args.kw_defaults
    for index, (arg, default) in enumerate(zip(positional + args.kwonlyargs, defaults, strict=True)):
        words += ["*"] if index == len(positional) else []
        words.append("_" if arg in args.posonlyargs and arg.arg != "self" else arg.arg)
        types.append(arg.annotation)
        if default is not None:  # its value: a number, a list, a member of an enum, a constant of the extension
            words[-1] += f"={eval(ast.unparse(default), dict(vars(_C)))!r}"
    for stars, arg in (("*", args.vararg), ("**", args.kwarg)):
        words += [stars + arg.arg] if arg else []
        types.append(arg.annotation if arg else None)
    return f"{''.join(f'@{ast.unparse(item)} ' for item in node.decorator_list)}def ({', '.join(words)})", types


def parts(node: ast.expr) -> list[ast.expr]:
    """Returns the members of a union, or the single type."""
    is_union = isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)
    return [*parts(node.left), *parts(node.right)] if is_union else [node]


def narrows(ours: ast.expr | None, theirs: ast.expr | None) -> bool:
    """True if type ``ours`` equals ``theirs`` or is narrower. None means no type; ``Any`` never suffices."""
    if ours is None or theirs is None:
        return theirs is None
    some, others = parts(ours), parts(theirs)
    if "object" in map(ast.unparse, others) or "Any" in map(ast.unparse, some):
        return "Any" not in map(ast.unparse, some)
    if len(some) > 1 or len(others) > 1:
        matches = [[narrows(a, b) for b in others] for a in some]
        return all(map(any, matches)) and all(map(any, zip(*matches, strict=True)))
    if not isinstance(ours, ast.Subscript) or not isinstance(theirs, ast.Subscript):
        is_bare = ast.unparse(theirs) in ("dict", "list", "tuple", "Callable") and isinstance(ours, ast.Subscript)
        return ast.unparse(ours.value if is_bare else ours) == ast.unparse(theirs)
    some, others = ([*one.slice.elts] if isinstance(one.slice, ast.Tuple) else [one.slice] for one in (ours, theirs))
    is_same = ast.unparse(ours.value) == ast.unparse(theirs.value) and len(some) == len(others)
    return is_same and all(map(narrows, some, others))


def difference(ours: ast.stmt, theirs: ast.stmt) -> str | None:
    """Returns how the stub's declaration differs from the extension's; None if it agrees."""
    (our_shape, our_types), (their_shape, their_types) = shape(ours), shape(theirs)
    if our_shape != their_shape:
        return f"is {our_shape} in the stub, {their_shape} in the extension"
    for pair in zip(our_types, their_types, strict=True):
        if not narrows(*pair):
            return "has type {} in the stub, {} in the extension".format(*(one and ast.unparse(one) for one in pair))
    text = None if isinstance(theirs, ast.AnnAssign | ast.Assign) else ast.get_docstring(theirs)
    return f"has no docstring in the stub; in the extension: {text}" if text and not ast.get_docstring(ours) else None


def differences(stub: str) -> list[str]:
    """Returns the differences between a stub's text and the extension, one line each."""
    ours, theirs = flat(ast.parse(stub).body), flat(made())
    missing = [f"{name} is in the extension alone" for name in theirs if name not in ours]
    left_out = CUDA_ONLY if _C.build_info()["cuda"] is None else re.compile("(?!)")
    extra = [f"{name} is in the stub alone" for name in ours if name not in theirs and not left_out.match(name)]
    found = {name: difference(ours[name], theirs[name]) for name in ours if name in theirs}
    return missing + extra + [f"{name} {text}" for name, text in found.items() if text]


def main() -> int:
    """Runs the command; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare patrickstar/_C.pyi with the extension")
    is_check = parser.parse_args().check
    lines = differences(STUB.read_text()) if is_check else [ast.unparse(node) for node in made()]
    print("\n".join(lines))
    return int(is_check and bool(lines))


if __name__ == "__main__":
    sys.exit(main())
