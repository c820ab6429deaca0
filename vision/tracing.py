"""A module's own forward as a graph that can be edited, and a forward made from the graph again.

torch.fx follows Python with stand-ins for tensors, and can be led astray: a branch taken on
`isinstance(x, Tensor)`, a loop over an unknown length. So each graph is run on inputs of the kind
that the module had in a real forward pass, and counts only if it gives what the module gives.
"""

from __future__ import annotations

import inspect
import itertools
import linecache
import operator
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from vision.layout import Layouts
from vision.watching import SideEffect, refuse_context, watching
from zoo.surgery import evaluating

Forward = Callable[..., Any]


class TraceError(ValueError):
    """A forward that cannot be followed; the message names the operation."""


@dataclass
class Call:
    """One call of a module in a forward pass.

    Attributes:
        arguments: By parameter name, defaults included; tensors are zeros.
        start: Place among the starts and ends of all calls.
        end: The same of its return.
        shape: Of the output; None where it is not one tensor.
        maps: Names of the arguments that are known to be maps (b c y x) or to hold some.
        gives_map: Whether the output is known to be one.
    """

    arguments: dict[str, Any]
    start: int
    end: int = -1
    shape: tuple[int, ...] | None = None
    maps: frozenset[str] = frozenset()
    gives_map: bool = False

    @property
    def has_map(self) -> bool:
        return self.gives_map or bool(self.maps)


@dataclass
class Traced:
    """The graphs of a forward, and what was seen when they ran.

    Attributes:
        graphs: By training flag; one for evaluation alone where training changes nothing.
        expand: Names of the children that were followed inside too.
        shapes: Of each node: a shape for a tensor, () for a collection of tensors, None for
            anything else.
        maps: Nodes whose values are known to be maps (b c y x).
    """

    graphs: dict[bool, fx.Graph]
    expand: frozenset[str] = frozenset()
    shapes: dict[fx.Node, tuple[int, ...] | None] = field(default_factory=dict)
    maps: set[fx.Node] = field(default_factory=set)


def record(model: nn.Module, inputs: Tensor) -> dict[nn.Module, Call]:
    """The first call of each module in an evaluation pass; changes no state of the model."""
    calls: dict[nn.Module, Call] = {}
    values: dict[nn.Module, tuple[dict[str, Any], Any]] = {}
    clock = itertools.count()

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module not in calls:
            arguments = _bound(module, args, kwargs)
            calls[module] = Call(tree_map(_outline, arguments), next(clock))
            values[module] = arguments, None

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call = calls[module]
        if call.end < 0:
            call.end = next(clock)
            call.shape = tuple(output.shape) if isinstance(output, Tensor) else None
            values[module] = values[module][0], output

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    try:
        with evaluating(model), torch.no_grad(), Layouts() as layouts:
            model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    for module, (arguments, output) in values.items():
        calls[module].maps = frozenset(
            name
            for name, value in arguments.items()
            if any(layouts.is_map(part) for part in tree_leaves(value))
        )
        calls[module].gives_map = layouts.is_map(output)
    return calls


def _bound(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name; a `*args` or `**kwargs` of the forward appears only where it got some."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    kinds = {name: p.kind for name, p in bound.signature.parameters.items()}
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        name: tree_map(lambda part: part, value)  # lists as they are now
        for name, value in bound.arguments.items()
        if kinds[name] not in variable or value
    }


def _outline(part: Any) -> Any:
    """Shape, type and device of a tensor without its values."""
    return part.new_zeros(()).expand(part.shape) if isinstance(part, Tensor) else part


def trace(
    module: nn.Module, call: Call, expand: frozenset[str] = frozenset(), training: bool = False
) -> Traced:
    """Follows a module's forward in evaluation, its children being steps of one piece.

    Args:
        module: Its forward as its class defines it.
        call: One real call, which tells the structure of the arguments.
        expand: Names of children that are followed inside too.
        training: Also as it is in training, where that differs.

    Raises:
        TraceError: The forward cannot be followed.
    """
    modes = {part: part.training for part in module.modules()}
    try:
        graphs = {}
        for mode in (False, True) if training else (False,):
            for name in ("", *expand):
                module.get_submodule(name).training = mode
            with watching(module):
                graphs[mode] = _Tracer(call.arguments, expand).trace(module)
    except SideEffect as error:
        raise TraceError(str(error)) from error
    except Exception as error:
        raise TraceError(_describe(error)) from error
    finally:
        for part, mode in modes.items():
            part.training = mode
    if training and _source(graphs[True]) == _source(graphs[False]):
        del graphs[True]
    return Traced(graphs, expand)


class _Proxy(fx.Proxy):
    """Overwrites where the forward does: fx makes `x += y` a sum of its own."""

    def _overwrite(self, operation: Any, other: Any) -> fx.Proxy:
        made: fx.Proxy = self.tracer.create_proxy("call_function", operation, (self, other), {})
        return made

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self._overwrite(operator.iadd, other)

    def __isub__(self, other: Any) -> fx.Proxy:
        return self._overwrite(operator.isub, other)

    def __imul__(self, other: Any) -> fx.Proxy:
        return self._overwrite(operator.imul, other)

    def __itruediv__(self, other: Any) -> fx.Proxy:
        return self._overwrite(operator.itruediv, other)


class _Tracer(fx.Tracer):
    """Arguments keep their structure: a list of tensors is a list, None is None."""

    def __init__(self, arguments: Mapping[str, Any], expand: frozenset[str]) -> None:
        super().__init__()
        self.arguments = arguments
        self.expand = expand

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self.expand

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        args: list[Any] = [self.root]
        for name, parameter in list(inspect.signature(root_fn).parameters.items())[1:]:
            value = self.arguments.get(name)
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                if value:
                    raise TypeError(f"the forward was called with {parameter}")
                continue
            if parameter.kind is parameter.KEYWORD_ONLY:
                raise TypeError(f"the forward has the keyword-only argument {name}")
            default = () if parameter.default is parameter.empty else (parameter.default,)
            args.append(_like(value, self.create_proxy("placeholder", name, default, {})))
        return root_fn, args

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        refuse_context()
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter) and not self._knows(a):
            raise TypeError(f"the forward makes a tensor {tuple(a.shape)} of its own")
        return super().create_arg(a)

    def _knows(self, tensor: Tensor) -> bool:
        return tensor in self.tensor_attrs or any(tensor is b for b in self.root.buffers())


def _like(value: Any, proxy: Any) -> Any:
    if isinstance(value, Tensor):
        return proxy
    if isinstance(value, list | tuple) and any(isinstance(part, Tensor) for part in value):
        return type(value)(_like(part, proxy[i]) for i, part in enumerate(value))
    return value


def _describe(error: Exception) -> str:
    """The line of the host at which tracing stopped, and why."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in frame.filename.replace("\\", "/") and frame.filename != __file__
    ]
    line = f"`{own[-1].line}` " if own and own[-1].line else ""
    where = f"{line}({own[-1].name}, line {own[-1].lineno}): " if own else ""
    return f"{where}{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def check(module: nn.Module, call: Call, traced: Traced) -> None:
    """Runs the graphs on random tensors in the places of the recorded ones; fills in shapes.

    Raises:
        TraceError: The graph gives something else than the module.
    """
    try:
        for training, graph in traced.graphs.items():
            active = ("", *traced.expand) if training else ()
            runner = _ShapeInterpreter(module, graph, call)
            with _same_random_numbers(module):
                wanted, _ = run(module, call, module.forward, active)
            with _same_random_numbers(module), runner.layouts:
                run(module, call, runner.run, active)
            traced.shapes |= runner.shapes
            traced.maps |= runner.maps()
            _compare(runner.returned, wanted)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise TraceError(f"the traced forward differs from the real one: {reason}") from error


@contextmanager
def _same_random_numbers(module: nn.Module) -> Iterator[None]:
    """The same in each of two runs, for dropout as a function."""
    devices = {p.device for p in module.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        yield


def run(
    module: nn.Module, call: Call, forward: Forward, training: Iterable[str] = ()
) -> tuple[Any, Any]:
    """Outputs, and the arguments afterwards, of a call with random tensors.

    All is in evaluation but the parts of the module that `training` names.
    """
    generator = torch.Generator().manual_seed(0)

    def random(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return torch.randn(value.shape, generator=generator).to(value)

    copies = tree_map(random, call.arguments)
    with evaluating(module), torch.no_grad():
        for name in training:
            module.get_submodule(name).training = True
        return forward(*copies.values()), copies


def same(one: Any, other: Any) -> bool:
    """Whether two structures of tensors agree."""
    try:
        _compare(one, other)
    except AssertionError:
        return False
    return True


def _compare(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, equal_nan=True)


class _ShapeInterpreter(fx.Interpreter):
    def __init__(self, module: nn.Module, graph: fx.Graph, call: Call) -> None:
        super().__init__(module, graph=graph)
        self.call = call
        self.layouts = Layouts()
        self.values: dict[fx.Node, Any] = {}
        self.shapes: dict[fx.Node, tuple[int, ...] | None] = {}
        self.returned: Any = None
        self.extra_traceback = False

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return value.clone() if isinstance(value, Tensor) else value  # statistics stay

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.shapes[n] = tuple(value.shape)
        elif isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value):
            self.shapes[n] = ()
        else:
            self.shapes[n] = None
        self.values[n] = value
        if n.op == "placeholder" and n.target in self.call.maps:
            self.layouts.mark(value)
        if n.op == "output":
            self.returned = value
            if self.call.gives_map:
                self.layouts.mark(value)
        return value

    def maps(self) -> set[fx.Node]:
        """The nodes whose values are known to be maps."""
        return {node for node, value in self.values.items() if self.layouts.is_map(value)}


def _source(graph: fx.Graph) -> str:
    return graph.python_code("self").src


_numbers = itertools.count()


def forward_of(traced: Traced, name: str) -> Forward:
    """The Python function of edited graphs; where there are two, the module's flag chooses."""
    made = {training: _compiled(graph, name) for training, graph in traced.graphs.items()}
    evaluation = made[False]
    if True not in made:
        return evaluation
    training_forward = made[True]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (training_forward if self.training else evaluation)(self, *args, **kwargs)

    return forward


def _compiled(graph: fx.Graph, name: str) -> Forward:
    code = graph.python_code("self")
    filename = f"<{name} with slots {next(_numbers)}>"
    lines = code.src.splitlines(keepends=True)
    linecache.cache[filename] = (len(code.src), None, lines, filename)  # for tracebacks
    scope: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, filename, "exec"), scope)
    forward = scope["forward"]
    assert isinstance(forward, types.FunctionType)
    return forward
