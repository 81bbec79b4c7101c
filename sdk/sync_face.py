"""Writes felix/sync.py, the synchronous face of the client, from its asynchronous classes (`make sync`).

Every public method and property of a class in FACES appears in its synchronous twin under the same name, with the same
parameters, defaults and docstring; what it returns is turned as `_body` says. What cannot be derived (iterators, the
publisher that gathers in the caller's thread) stands in felix/blocking.py, from which the twin then inherits, and what has
no meaning for a caller in another thread is named in LEFT_OUT, with the reason.
tests/client/test_sync_face.py holds the file to this program, and every signature to its origin.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
TARGET: Final = ROOT / "felix" / "sync.py"


class Face(NamedTuple):
    """An asynchronous class, the module it stands in, and the class of felix/blocking.py that its twin begins from."""

    module: str
    name: str
    base: str

    @property
    def twin(self) -> str:
        return "SyncRegion" if self.name == "RegionClient" else f"Sync{self.name}"


FACES: Final = (
    Face("client", "RegionClient", "BlockingRegion"),
    Face("transaction", "Transaction", "BlockingTransaction"),
    Face("stream", "Stream", "Blocking"),
    Face("publisher", "Publisher", "GatheringPublisher"),
    Face("subscription", "Subscription", "RecordIterator"),
    Face("consumer", "Consumer", "BlockingConsumer"),
    Face("cache", "Cache", "Blocking"),
    Face("cache", "Watch", "ChangeIterator"),
    Face("cache", "Mirror", "BlockingMirror"),
    Face("queue", "Queue", "Blocking"),
    Face("queue", "QueueConsumer", "JobIterator"),
    Face("queue", "Job", "BlockingJob"),
)
_BY_NAME: Final = {face.name: face for face in FACES}

_OPENED: Final = "it is opened when it is made"
_ENGINE: Final = "the connection calls it, on its loop"
_FUTURE: Final = "a future of the background loop is of no use in another thread"
_SHARED: Final = "the client closes it with itself"
LEFT_OUT: Final[dict[str, dict[str, str]]] = {
    "RegionClient": {"open": _OPENED, "connection": "what it gives lives on the background loop"},
    "Transaction": {},
    "Stream": {"publish_nowait": _FUTURE},
    "Publisher": {
        "open": _OPENED, "publish_nowait": _FUTURE, "pump": _ENGINE, "link_up": _ENGINE, "link_down": _ENGINE, "link_dead": _ENGINE,
    },
    "Subscription": {"open": _OPENED},
    "Consumer": {
        "open": _OPENED, "ack_nowait": _FUTURE, "opened": _ENGINE, "lost": _ENGINE, "ended": _ENGINE, "event": _ENGINE,
        "frame": _ENGINE,
    },
    "Cache": {"close": _SHARED},
    "Watch": {"open": _OPENED, "opened": _ENGINE, "lost": _ENGINE, "ended": _ENGINE, "event": _ENGINE, "frame": _ENGINE},
    "Mirror": {"open": _OPENED},
    "Queue": {"close": _SHARED},
    "QueueConsumer": {"open": _OPENED},
    "Job": {"left_to_transaction": "the transaction calls it"},
}  # fmt: skip
"""Public names that the twin does not have, and why."""

_OPENS: Final = {"Publisher", "Subscription", "Consumer", "Watch", "Mirror", "QueueConsumer"}
"""Classes whose `open` is called before the twin is given out."""

_HEAD: Final = '''"""The synchronous face of the client, for scripts and notebooks: the same objects behind a background loop.

::

    import felix.sync

    with felix.sync.connect("us-east") as region:
        orders = region.stream("acme/payments/orders")
        offset = orders.publish(b'{"id": 7}', key=b"7")
        for record in orders.subscribe(start="earliest"):
            ...

One thread with one event loop per client; any thread may call. A call blocks until it is done, and Ctrl-C ends the wait
(what was already sent stays sent). Inside a running event loop use `felix.connect`; from there a blocking call is refused,
but for the loop that runs a notebook's cells: a cell blocks it anyway, as any cell does until it is done.
Errors are those of `felix.client`. Functions that are handed over (`on_gap`, `on_refused`, ...) run in the background thread.

Written by sdk/sync_face.py from the asynchronous classes (`make sync`): change those, and felix.blocking.
"""

from __future__ import annotations

'''

_CONNECT: Final = '''

def connect{parameters} -> SyncRegion:
    """Connect now; arguments and errors are those of `felix.connect`. Close it, or use it as `with`."""
    background = Background()
    try:
        made = client.connect({passed})
        background.call(made.open())
    except BaseException:
        background.stop()
        raise
    return SyncRegion(background, made)
'''


class _Module:
    """One asynchronous module: its classes, and where each name in it comes from."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tree = ast.parse((ROOT / "felix" / f"{name}.py").read_text())
        self.origins: dict[str, str] = {}
        for node in self.tree.body:
            match node:
                case ast.ImportFrom(module=module, names=names):
                    for each in names:
                        bound = each.asname or each.name
                        renamed = f" as {each.asname}" if each.asname else ""
                        self.origins[bound] = f"from {module} import {each.name}{renamed}"
                case ast.Import(names=names):
                    for each in names:
                        self.origins[each.asname or each.name] = f"import {each.name}"
                case ast.ClassDef(name=bound) | ast.FunctionDef(name=bound):
                    self.origins[bound] = f"from felix.{name} import {bound}"
                case ast.Assign(targets=[ast.Name(id=bound)]) | ast.AnnAssign(target=ast.Name(id=bound)):
                    self.origins[bound] = f"from felix.{name} import {bound}"
                case _:
                    pass

    def top(self, name: str) -> ast.ClassDef | ast.FunctionDef:
        return next(
            node
            for node in self.tree.body
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
        )


class _Writer:
    def __init__(self) -> None:
        self.modules = {name: _Module(name) for name in sorted({face.module for face in FACES})}
        blocking = ast.parse((ROOT / "felix" / "blocking.py").read_text())
        self.bases = {node.name: node for node in blocking.body if isinstance(node, ast.ClassDef)}
        self.imports: set[str] = {
            "from typing import Self", "from felix import client", "from felix.blocking import Background",
            "from felix.blocking import Blocking", "from felix.blocking import inner_of",
        }  # fmt: skip

    def write(self) -> str:
        classes = [self._class(face) for face in FACES]
        connect = self.modules["client"].top("connect")
        assert isinstance(connect, ast.FunctionDef)
        parameters = self._parameters(connect.args, self.modules["client"])
        head = _CONNECT.format(parameters=f"({parameters})", passed=_passed(connect.args))
        return _HEAD + "\n".join(sorted(self.imports)) + "\n" + head + "".join(classes)

    def _class(self, face: Face) -> str:
        module = self.modules[face.module]
        origin = module.top(face.name)
        assert isinstance(origin, ast.ClassDef)
        self._need(f"{face.name}", module)
        base = f"Blocking[{face.name}]" if face.base == "Blocking" else face.base
        self.imports.add(f"from felix.blocking import {face.base}")
        there = self._inherited(face.base)
        more = "" if face.base == "Blocking" else f"; see `felix.blocking.{face.base}`"
        lines = [
            f"\n\nclass {face.twin}({base}):",
            f'    """As `felix.{face.module}.{face.name}`, blocking{more}."""',
            "",
            "    __slots__ = ()",
        ]  # fmt: skip
        for node in origin.body:
            if (
                not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                or node.name.startswith("_")
                or node.name in there
                or node.name in LEFT_OUT[face.name]
            ):
                continue
            lines += ["", *self._method(node, module)]
        if face.name == "QueueConsumer":
            lines += ["", _JOBS]
        return "\n".join(lines) + "\n"

    def _inherited(self, base: str) -> set[str]:
        node = self.bases[base]
        found = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        for parent in node.bases:
            name = parent.value if isinstance(parent, ast.Subscript) else parent
            if isinstance(name, ast.Name) and name.id in self.bases:
                found |= self._inherited(name.id)
        return found

    def _method(self, node: ast.FunctionDef | ast.AsyncFunctionDef, module: _Module) -> list[str]:
        returned = ast.unparse(node.returns) if node.returns is not None else "None"
        is_property = any(ast.unparse(each) == "property" for each in node.decorator_list)
        parameters = self._parameters(node.args, module)
        result, body = self._body(node, returned, is_property)
        self._need(result, module)
        said = ast.get_docstring(node, clean=False)
        lines = ["    @property"] if is_property else []
        lines.append(f"    def {node.name}({parameters}) -> {result}:")
        if said is not None:
            lines.append(f'        """{said}"""')
        return [*lines, *(f"        {line}" for line in body)]

    def _body(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, returned: str, is_property: bool
    ) -> tuple[str, list[str]]:
        """The annotation of what the twin returns, and its statements.

        - a property is read as it is; a plain function is called on the loop;
        - a coroutine, or a function that gives a future, is waited for;
        - an asynchronous iterator is gathered into `Rows`, and a list of states becomes `Rows`, too;
        - an object that has a twin is given out as that, opened where it can be.
        """
        call = f"self._inner.{node.name}"
        passed = _passed(node.args)
        more = f", {passed}" if passed else ""
        if is_property:
            return returned, [f"return {call}"]
        if returned in _BY_NAME:
            twin = _BY_NAME[returned].twin
            if isinstance(node, ast.AsyncFunctionDef):
                made = f"self._background.call({call}({passed}))"
            else:
                how = "opened" if returned in _OPENS else "run"
                made = f"self._background.{how}({call}{more})"
            options = (
                ", linger_ms=linger_ms, batch_bytes=batch_bytes, batch_records=batch_records"
                if returned == "Publisher"
                else ""
            )
            return twin, [f"return {twin}(self._background, {made}{options})"]
        if returned.startswith("AsyncIterator["):
            self.imports.add("from felix.notebook import Rows")
            inside = returned.removeprefix("AsyncIterator[")[:-1]
            return f"Rows[{inside}]", [f"return self._background.collect({call}{more})"]
        if returned.startswith("asyncio.Future["):
            inside = returned.removeprefix("asyncio.Future[")[:-1]
            word = "" if inside == "None" else "return "
            return inside, [f"{word}self._background.wait({call}{more})"]
        called = f"{call}({passed})"
        waited = (
            f"self._background.call({called})"
            if isinstance(node, ast.AsyncFunctionDef)
            else f"self._background.run({call}{more})"
        )
        if returned == "None":
            return "None", [waited]
        inside = returned.removeprefix("list[")[:-1]
        if returned.startswith("list[") and inside in _BY_NAME:
            twin = _BY_NAME[inside].twin
            return f"list[{twin}]", [f"return [{twin}(self._background, each) for each in {waited}]"]
        if returned.startswith("list[") and inside.endswith(("State", "Traffic")):
            self.imports.add("from felix.notebook import Rows")
            return f"Rows[{inside}]", [f"return Rows({waited})"]
        return returned, [f"return {waited}"]

    def _parameters(self, arguments: ast.arguments, module: _Module) -> str:
        """As in the origin; an object that has a twin is taken as that."""
        for each in [
            *arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg,
        ]:  # fmt: skip
            if each is not None and each.annotation is not None:
                each.annotation = _Twins().visit(each.annotation)
                self._need(ast.unparse(each.annotation), module)
        for default in [*arguments.defaults, *arguments.kw_defaults]:
            if default is not None:
                self._need(ast.unparse(default), module)
        return ast.unparse(arguments)

    def _need(self, expression: str, module: _Module) -> None:
        """Import every name of an expression from where the module has it."""
        for node in ast.walk(ast.parse(expression, mode="eval")):
            if isinstance(node, ast.Name) and node.id in module.origins:
                self.imports.add(module.origins[node.id])


class _Twins(ast.NodeTransformer):
    """Names of classes that have a twin, as its name."""

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(_BY_NAME[node.id].twin) if node.id in _BY_NAME else node


def _takes_twin(annotation: ast.expr | None) -> bool:
    return annotation is not None and any(
        isinstance(node, ast.Name) and node.id in {face.twin for face in FACES}
        for node in ast.walk(annotation)
    )


def _passed(arguments: ast.arguments) -> str:
    """The call's arguments: by position what may be so, else by name; of a twin its inner object."""
    parts = [
        f"inner_of({each.arg})" if _takes_twin(each.annotation) else each.arg
        for each in [*arguments.posonlyargs, *arguments.args]
        if each.arg != "self"
    ]
    if arguments.vararg is not None:
        name = arguments.vararg.arg
        parts.append(f"*map(inner_of, {name})" if _takes_twin(arguments.vararg.annotation) else f"*{name}")
    for each in arguments.kwonlyargs:
        value = f"inner_of({each.arg})" if _takes_twin(each.annotation) else each.arg
        parts.append(f"{each.arg}={value}")
    return ", ".join(parts)


_JOBS: Final = '''    def __iter__(self) -> Self:
        return self

    def __next__(self) -> SyncJob:
        job = self.next_job()
        if job is None:
            raise StopIteration
        return job

    def next_job(self, timeout_s: float | None = None) -> SyncJob | None:
        """The next job; None after `close`. Raises TimeoutError where none came within `timeout_s` seconds (None: waits)."""
        job = self._next(timeout_s)
        return None if job is None else SyncJob(self._background, job)'''


def generated() -> str:
    """The text of felix/sync.py, formatted. Needs ruff."""
    text = _Writer().write()
    for command in (["check", "--fix", "--quiet", "--select", "I,F401"], ["format", "--quiet"]):
        text = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(TARGET), "-"],
            input=text, capture_output=True, text=True, check=True, cwd=ROOT,
        ).stdout  # fmt: skip
    return text


if __name__ == "__main__":
    TARGET.write_text(generated())
