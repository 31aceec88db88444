"""What a Python source imports."""

import ast
from collections.abc import Iterator
from typing import NamedTuple

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Import(NamedTuple):
    """A module that a source imports, where, and whether only once a function is called."""

    name: str
    line: int
    is_lazy: bool


def imports_of(node: ast.AST, is_lazy: bool = False) -> Iterator[Import]:
    """Every absolute import below ``node``, and every ``import_module`` of a name written out."""
    match node:
        case ast.Import():
            yield from (Import(alias.name, node.lineno, is_lazy) for alias in node.names)
        case ast.ImportFrom(module=str(name), level=0):
            yield Import(name, node.lineno, is_lazy)
        case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
            if ast.unparse(func).endswith(("import_module", "__import__")):
                yield Import(name, node.lineno, is_lazy)
    for child in ast.iter_child_nodes(node):
        yield from imports_of(child, is_lazy or isinstance(node, FUNCTIONS))
