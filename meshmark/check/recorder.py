"""Observe a training script from inside one of its ranks, with PyTorch hooks only.

The hooks are on `nn.Module.__call__` (of the outermost module), loss functions, `backward`, `clip_grad_norm_`,
`GradScaler` and the optimizer's step. They do not communicate, and they change nothing that the script computes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_pre_hook,
)

from meshmark.check.attributes import is_same, kept, plain_attributes
from meshmark.check.bare import bare_copy, redirected_to
from meshmark.check.deepspeed_engine import (
    engine_in,
    observe_clipping,
    observe_scaling,
    refuse_unseen,
    zero_pieces,
)
from meshmark.check.host_random import host_random
from meshmark.check.pieces import (
    CannotTellError,
    Piece,
    bare_modules,
    flat_pieces,
    is_dtensor,
    local,
    named_parameters,
    piece_of,
    unwrapped,
)
from meshmark.check.recording import Call, Clip, Facts, Folder, Gather, Group, Step, Term
from meshmark.check.rows import unordered_digest
from meshmark.check.tensor_parallel import partners
from meshmark.check.tree import tensors_in, with_tensors
from meshmark.check.wrappers import communication_hooks, wrapper_around, wrappers_in

LOSSES = (
    "cross_entropy",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
DIFFERENTIATES = (
    "the script differentiates a gradient (create_graph=True), as a gradient penalty does: what that adds to the "
    "gradients of parameters passes no output of the model, where gradients are recorded"
)
_FEW_OPERATIONS = 8
"""Operations between what a `GradScaler` returns and the loss that a script differentiates, at most."""
SKETCHED = 512
"""Number of elements kept of each output."""
MEET_SECONDS = 60.0
"""Seconds that a rank waits for the others before the script is stopped."""
MOST_NODES = 100_000
"""Largest number of autograd nodes searched between the loss and the model's outputs."""


_COMPILER = "torch/_dynamo/eval_frame.py"
"""File through which calls of compiled functions go."""
MOST_SWALLOWED = 3
"""Number of steps that a script which catches everything may begin after it was ended."""


class EnoughError(BaseException):
    """Ends the script when enough steps are recorded.

    It is not an `Exception`, because scripts may catch those.
    """


class Recorder:
    """Hooks of one rank, and what they have recorded."""

    def __init__(self, folder: Folder, *, rank: int, world: int, steps: int, limit: int) -> None:
        self.folder, self.rank, self.world, self.steps, self.left = folder, rank, world, steps, limit
        self.active = True
        self.depth = 0
        """Number of modules that are being called, one inside the other."""
        self.inside_model = False
        """Whether the outermost of them is recorded. Others have no parameters, as loss functions have none."""
        self.in_backward = False
        self.thread = threading.get_ident()
        self.trains_at_first: dict[int, dict[str, bool]] = {}
        self.attributes_at_first: dict[int, dict[tuple[str, ...], Any]] = {}
        self.blind = False
        """Whether a model in training was called with gradients switched off since the last step."""
        self.blind_steps = 0
        """By outermost module, whether each parameter required a gradient when it was first called."""
        self.aliases: dict[str, str] = {}
        """Names of parameters that an outermost module shares with an earlier one, and what they are called there."""
        self.roots: list[nn.Module] = []
        """Outermost modules that the script calls, without their wrappers."""
        self.outers: list[nn.Module] = []
        """The same with their wrappers, also if the script calls past these."""
        self.held_by: list[list[int]] = []
        """Ids of the parameters of each of them."""
        self.wrappers: list[str] = []
        self.partners: tuple[int, ...] = ()
        """Ranks that compute the forward pass together with this one."""
        self.gradient_pieces: dict[str, Piece] = {}
        """Places of gradients that are stored otherwise than their parameters."""
        self.partial: set[str] = set()
        """Parameters whose gradients are partial sums on this rank."""
        self.bypassed = ""
        """Class of a wrapper past which the script calls a module."""
        self.copies: dict[int, nn.Module] = {}
        self.parameters: dict[str, Tensor] = {}
        self.names: dict[int, str] = {}
        self.clips_inside = False
        self.num_calls: list[int] = []
        """Number of calls of each step."""
        self.uncompiled = False
        self.over = False
        """Whether the script was ended."""
        self.swallowed = 0
        """Number of steps that the script has begun after it was ended."""
        self.conclude: Callable[[], NoReturn] | None = None
        """Gives the verdict and ends this process. None where others own the process."""
        self.flats: dict[str, tuple[Any, slice]] = {}
        self.pieces: dict[str, Piece] = {}
        self.last: dict[str, Tensor] = {}
        self.optimizers: list[Optimizer] = []
        self.taken: Counter[int] = Counter()
        """Number of steps of each optimizer."""
        self.held: set[str] = set()
        """Parameters that an optimizer holds."""
        self.strangers = 0
        """Number of tensors that an optimizer holds in one group and that belong to no model that was called."""
        self.root_of: dict[str, int] = {}
        """Number of the outermost module of each parameter."""
        self.trained_roots: set[int] = set()
        """Numbers of outermost modules that were called with gradients. An average of weights is not among them."""
        self.scheduled: dict[int, int] = {}
        self.epochs: dict[int, tuple[int, int]] = {}
        """Epoch of the last iterator of every shuffling `DistributedSampler`, and the number of steps before it."""
        self.epoch_again: int | None = None
        self.state_marks: dict[tuple[int, str], tuple[Any, ...]] = {}
        """What tells of the state of every optimizer and parameter whether it was written to since its last step."""
        self.marks: dict[str, tuple[int, ...]] = {}
        """What tells of every parameter whether it was written to since the step began."""
        self.inside_loop: nn.Module | None = None
        """Module of Lightning's whose `training_step` runs backward and the optimizer itself."""
        self.number = 0
        self.step: Step | None = None
        self.stepped = False
        self.scale = 1.0
        self.unscaled = True
        self.scaled: list[Any] = []
        """Nodes of this step's losses that a `GradScaler` has multiplied."""
        self.opened: tuple[Call, nn.Module] | None = None
        """The call of the outermost module that has just begun, and that module without wrappers."""
        self.differentiates = False
        """Whether the script has built a graph of a gradient."""
        self.entering = 1.0
        """Factor by which a wrapper has multiplied the gradient that `_saw_gradient` sees next."""
        self.entered = False
        """Whether that call has come to the module without wrappers."""
        self.given: list[int] = []
        """Ids of the tensors that the outermost module was given in that call."""
        self.updating: Optimizer | None = None
        """The optimizer whose step runs. Those that it calls are parts of it."""
        self.ends: dict[tuple[int, int], tuple[Any, Call, int]] = {}
        self.inner_terms: list[tuple[Term, tuple[int, int]]] = []
        """Results of loss functions inside the outermost module, in the call that has just begun."""
        self.gradient_marks: dict[str, tuple[int, ...]] = {}
        """Marks of the gradients when the last backward pass ended."""
        self.reduces = False
        """Whether the script has called a collective since that pass began."""
        self.sums_narrow = ""
        """The dtype below 32 bits in which the script itself has summed tensors over ranks after a forward pass."""
        self.terms: dict[tuple[Any, int], Term] = {}
        """Results of loss functions that were not differentiated yet, by their node of the autograd graph."""
        self.old_ends: dict[tuple[int, int], tuple[Any, Call, int]] = {}
        """The same of the step before."""
        self.met = True
        """Whether all ranks came to the end of their last step in time."""
        self.device = "cpu"
        self.reason = ""
        self.record_seconds = 0.0
        self.began = self.ended = 0.0

    # What the hooks see

    def around_call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        if (
            self.depth
            or not self.active
            or self.in_backward
            or threading.get_ident() != self.thread
            or not any(p.requires_grad for p in module.parameters())
            or any(is_lazy(p) for p in module.parameters())  # their shapes come from this call
            or type(module).__name__ == "ParametrizationList"  # a weight that is computed where it is looked up
        ):
            self._look_inside(module, args, kwargs)
            self.depth += 1
            try:
                return original(module, *args, **kwargs)
            finally:
                self.depth -= 1
        if runs_the_loop(module):
            if type(module).__name__ == "FullyShardedDataParallel":
                self.refuse("Lightning's manual optimization under FSDP1, where modules lack their own parameters")
            outside, self.inside_loop = self.inside_loop, unwrapped(module)
            try:
                return original(module, *args, **kwargs)
            finally:
                self.inside_loop = outside
        call = None
        with self._timed():
            if is_functional(args, kwargs):
                if torch.is_grad_enabled():
                    self.refuse("torch.func calls the model with tensors that stand in for its parameters or inputs")
            elif torch.is_grad_enabled():
                number = self._root(module)
                self.trained_roots.add(number)
                call = self._begin(number, module, args, kwargs)
            else:
                self._root(module)
                self.blind = module.training
        self.depth, self.inside_model = self.depth + 1, True
        try:
            outputs = original(module, *args, **kwargs)
        finally:
            self.depth, self.inside_model = self.depth - 1, False
        if call is not None:
            with self._timed():
                self._observe_outputs(call, outputs)
        return outputs

    def _look_inside(self, module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        """Note what wrappers around the user's module, or in the place of its forward pass, change.

        Fabric converts inputs and enters autocast around the module. Accelerate enters autocast inside its `forward`,
        and leaves the user's own as `_original_forward`, which the copy has: the first module that is called inside
        shows whether autocast is on.
        """
        if self.opened is None or self.in_backward:
            return
        call, bare = self.opened
        if module is bare and not self.entered:
            self.entered = True
            call.autocast = self._autocast() or call.autocast
            now = _buffers(bare)  # DDP has broadcast the first rank's
            held = {n: x for n, x in call.buffers.items() if n in now and x.dtype is now[n].dtype}
            call.replaced = [n for n, x in held.items() if not _same(x, now[n])]
            call.buffers = now
            if [id(t) for t in tensors_in((args, kwargs))] != self.given:
                call.inputs = with_tensors((args, dict(kwargs)), _kept)
        elif self.entered or unwrapped(module) is not bare:
            self.opened = None
            if "_original_forward" in vars(bare):
                call.autocast = self._autocast() or call.autocast

    def _autocast(self) -> torch.dtype | None:
        return torch.get_autocast_dtype(self.device) if torch.is_autocast_enabled(self.device) else None

    def around_backward(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        if not self.active or self.in_backward or threading.get_ident() != self.thread:
            return original(*args, **kwargs)
        with self._timed():
            tensors = args[0] if args else kwargs.get("tensors")
            tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors or ())
            if kwargs.get("create_graph") or (len(args) > 3 and args[3]):
                self.refuse(DIFFERENTIATES)
            self._look_past_outputs(tensors)
            self._note_operations(tensors)
            self._look_for_multipliers(tensors)
            if self.step is not None:
                self.step.losses += [float(t.detach()) for t in tensors if t.numel() == 1]
                scale = self.scale if self._are_scaled(tensors) else 1.0
                self.step.not_scaled = self.scale / scale
                for call in self.step.calls:
                    if not any(g is not None for g in call.gradients):
                        call.scale = scale
        self.in_backward, self.reduces = True, False
        try:
            return original(*args, **kwargs)
        finally:
            self.in_backward = False
            with self._timed():
                self.gradient_marks = self._gradient_marks() if self.active else {}

    def saw_loss(self, name: str, args: Any, kwargs: Any, result: Any) -> None:  # noqa: ANN401
        if not self.active or self.in_backward or not isinstance(result, Tensor) or not result.requires_grad:
            return
        with self._timed():
            self._note_term(name, args, kwargs, result)

    def before_clip(
        self,
        parameters: Any,  # noqa: ANN401
        max_norm: float,
        norm_type: float = 2.0,
        *,
        by_value: bool = False,
    ) -> Clip | None:
        """Record a clipping, and return the record. None if it is none, or is not observed."""
        if not self.active or self.step is None or self.clips_inside:
            return None
        if not by_value and max_norm == math.inf:  # asks for the norm alone
            return None
        with self._timed():
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            names = self._held(given)
            if not names:
                return None
            if all(p.grad is None for p in given):
                self.step.clipped_nothing += names
                return None
            if not self.step.clips:
                self._note_edits(names)
            named = {name for clip in self.step.clips for name in clip.names}
            is_part = bool(named) and named.isdisjoint(names)  # as in a loop over parameters
            clip = Clip(
                names=names,
                gradients=self._gradients(names if is_part else self.parameters),
                max_norm=float(max_norm),
                norm_type=float(norm_type),
                by_value=by_value,
                scaled=1.0 if self.unscaled else self.scale,
                num_calls=len(self.step.calls),
            )
            self.step.clips.append(clip)
            return clip

    def saw_clear(self) -> None:
        """Note that gradients are cleared, which a script does without a step where it skips a batch."""
        if self.active and self.step is not None and not self.step.groups:
            # A call may have come since, before its backward pass.
            had = [
                number for number, call in enumerate(self.step.calls, 1) if any(g is not None for g in call.gradients)
            ]
            self.step.cleared = max(had, default=self.step.cleared)

    @contextlib.contextmanager
    def unseen_clipping(self) -> Iterator[None]:
        """Do not record clipping inside, which is part of one that was recorded."""
        self.clips_inside = True
        try:
            yield
        finally:
            self.clips_inside = False

    def _are_scaled(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether losses are made of what a `GradScaler` has multiplied, in a few operations."""
        ends = {id(end) for end in self.scaled}
        level = {id(t.grad_fn): t.grad_fn for t in tensors if t.grad_fn is not None}
        for _ in range(_FEW_OPERATIONS):
            if ends & level.keys():
                return True
            children = (child for node in level.values() for child, _ in node.next_functions)
            level = {id(child): child for child in children if child is not None}
        return not ends

    def saw_scaling(self, factor: float) -> None:
        """Note the factor of the gradient that enters an output of a wrapper next."""
        self.entering = factor

    def saw_clip(self, pairs: Iterable[tuple[Tensor, Tensor]], max_norm: float) -> None:
        """Note that a wrapper clips tensors that an optimizer holds, given with their gradients.

        A wrapper may clip one after another, all by one norm; that is one clipping.
        """
        if not self.active or self.step is None:
            return
        with self._timed():
            found = {
                name: _kept(self._part(name, local(gradient)))
                for tensor, gradient in pairs
                for name in self._held([tensor])
            }
            if not self.step.clips:
                self.step.clips.append(Clip(names=[], gradients={}, max_norm=max_norm, norm_type=2.0))
            self.step.clips[-1].names += list(found)
            self.step.clips[-1].gradients |= found

    def before_hooks(self, optimizer: Optimizer, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """Put `before` behind an optimizer's own hooks before its step, and `after` in front of those after it."""
        self.end_again()
        first, last = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        if before not in first.values():
            optimizer.register_step_pre_hook(before)
            optimizer.register_step_post_hook(after)
        for key in [key for key, hook in first.items() if hook is before]:
            first[key] = first.pop(key)
        for key in [key for key, hook in last.items() if hook is not after]:
            last[key] = last.pop(key)

    def stay_uncompiled(self) -> None:
        """Keep `torch.compile` out of the hooks on steps, which a script may compile."""
        if not self.uncompiled:
            self.uncompiled = True
            for name in ("before_hooks", "before_step", "after_step", "saw_clear"):
                setattr(self, name, torch.compiler.disable(getattr(self, name)))  # type: ignore[no-untyped-call]

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:  # noqa: ANN401
        """Record the gradients that an optimizer steps on. Return other arguments for its step, or None.

        A closure, inside of which forward and backward run, is followed by the record.
        """
        if not self.active or self.updating is not None:
            return None
        self.updating = optimizer
        closures = [a for a in (*args[1:], *kwargs.values()) if callable(a)]
        if not closures:
            self._record_step(optimizer)
            return None
        called = 0

        @functools.wraps(closures[0])
        def followed() -> Any:  # noqa: ANN401
            nonlocal called
            called += 1
            if called > 1:
                self.refuse("the optimizer calls its closure more than once a step")
            loss = closures[0]()
            self._record_step(optimizer)
            return loss

        def changed(value: Any) -> Any:  # noqa: ANN401
            return followed if value is closures[0] else value

        return tuple(changed(a) for a in args), {key: changed(a) for key, a in kwargs.items()}

    def _record_step(self, optimizer: Optimizer) -> None:
        if self.active and self.step is None and self.blind:
            self.blind, self.blind_steps = False, self.blind_steps + 1
            if self.blind_steps >= self.steps:
                self._stop()
        if not self.active or self.step is None:
            return
        with self._timed():
            step = self.step
            if not self.optimizers:
                self._look_for_wrappers()
            if optimizer not in self.optimizers:
                self.optimizers.append(optimizer)
            which = self.optimizers.index(optimizer)
            self.taken[which] += 1
            earlier = {name for g in step.groups if g.optimizer == which for name in g.names}
            groups = [(group, self._held(group["params"])) for group in optimizer.param_groups]
            if earlier & {name for _, names in groups for name in names}:
                self.refuse("an optimizer steps twice without a call of the model in between")
                return
            is_compiled = any(frame.f_code.co_filename.endswith(_COMPILER) for frame in _frames())
            for group, names in groups:
                held = group["params"]
                options = {k: _plain(v) for k, v in group.items() if k not in ("params", "param_names")}
                if hasattr(optimizer, "adam_w_mode"):  # DeepSpeed's compiled Adam, which keeps it out of its groups
                    options["adam_w_mode"] = bool(optimizer.adam_w_mode)
                self.held.update(names)
                self.strangers = max(self.strangers, sum(id(p) not in self.names for p in held))
                rule = type(getattr(optimizer, "optim", optimizer))  # ZeroRedundancyOptimizer has one inside
                cls = f"{rule.__module__}.{rule.__qualname__}"
                group_made = Group(optimizer=which, cls=cls, names=names, options=options, is_compiled=is_compiled)
                step.groups.append(group_made)
                step.stepped_from |= self._changed_weights(names)
                for p in held:
                    state, names_of_p = optimizer.state.get(p) or {}, self._held([p])
                    known = [self.state_marks.get((which, name), ()) for name in names_of_p]
                    if names_of_p and any(_state_mark(state) != mark for mark in known):
                        step.state |= {n: {k: self._state(n, p, v) for k, v in state.items()} for n in names_of_p}
                step.gradients |= self._gradients(names)
                if not self.unscaled and getattr(optimizer, "grad_scale", None) is None:
                    step.still_scaled = self.scale
                clipped = {name for clip in step.clips for name in clip.names}
                self._note_edits([name for name in names if name not in clipped])

    def _note_edits(self, names: Iterable[str]) -> None:
        """Note which gradients the script has changed since the backward pass, or changes in hooks."""
        if self.step is None or self.reduces or self.scale != 1.0:
            return
        marks = self._gradient_marks()
        self.step.edited |= {n for n in names if n in marks and marks[n] != self.gradient_marks.get(n)}
        self.step.edited |= {n for n in names if getattr(self.parameters[n], "_backward_hooks", None)}

    def after_step(self, optimizer: Optimizer) -> None:
        if optimizer is not self.updating:
            return
        self.updating = None
        if self.active and self.reason and self.step is None:  # nothing will be recorded
            self._stop()
        if not self.active or self.step is None or not self.step.groups:
            return
        with self._timed():
            self.stepped = True
            self.last = self.step.after = self._values()
            which = self.optimizers.index(optimizer)
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                mark = _state_mark(optimizer.state.get(p) or {})
                self.state_marks |= {(which, name): mark for name in self._held([p])}
            self.ended = time.perf_counter()

    def saw_collective(self, name: str, tensors: Iterable[Tensor], function: Any) -> None:  # noqa: ANN401
        """Note a collective of the script's own that stands between forward and backward.

        In the forward pass of an `autograd.Function`, which is given then, the gradients that pass it are recorded.
        """
        step = self.step
        if not self.active or self.inside_model or step is None or not step.calls or step.groups:
            return
        given = list(tensors)
        if name == "all_reduce":
            self._note_narrow_sums(given)
        if self.in_backward:
            return
        # Numbers alone are no gradients: what clips by hand adds up the squares of each rank's norm.
        self.reduces = self.reduces or any(t.numel() > 1 for t in given)
        values = [t for t in given if t.is_floating_point() and t.numel() > 1]
        if values and not any(g is not None for g in step.calls[-1].gradients):
            if function is None:
                step.gathered = step.gathered or name
            elif name.startswith("all_gather"):
                with self._timed():
                    results: list[Tensor] = []  # copied at once: the backward pass may reduce them where they are
                    function.register_prehook(functools.partial(self._saw_gathered, results))
                    function.register_hook(functools.partial(self._saw_given, step, results))

    def _note_narrow_sums(self, given: Iterable[Tensor]) -> None:
        """Note a sum over ranks in less than 32 bits of what may be gradients: of a parameter's size, or of several."""
        sizes = {p.numel() for p in self.parameters.values()}
        for tensor in given:
            is_narrow = tensor.is_floating_point() and torch.finfo(tensor.dtype).bits < 32
            if is_narrow and sizes and (tensor.numel() in sizes or tensor.numel() >= max(sizes)):
                self.sums_narrow = str(tensor.dtype).removeprefix("torch.")

    def _saw_gathered(self, results: list[Tensor], gradients: tuple[Tensor | None, ...]) -> None:
        """Keep the gradients of a gather's result."""
        if self.active:
            with self._timed():
                results[:] = [_kept(g) for g in gradients if g is not None]

    def _saw_given(
        self, step: Step, results: list[Tensor], inputs: tuple[Tensor | None, ...], _: tuple[Tensor | None, ...]
    ) -> None:
        """Record the gradients of a gather's result and of what it was given, if their shapes tell which is whose."""
        given = [g for g in inputs if g is not None]
        if not self.active or len(given) != 1 or not results:
            return
        shape = tuple(given[0].shape)
        with self._timed():
            if len(results) == self.world and all(tuple(g.shape) == shape for g in results):
                step.gathers.append(Gather(given=_kept(given[0]), result=torch.stack(results)))
            elif len(results) == 1 and results[0].numel() == self.world * given[0].numel():
                whole = results[0]
                if tuple(whole.shape) in ((self.world, *shape), (self.world * shape[0], *shape[1:])):
                    step.gathers.append(Gather(given=_kept(given[0]), result=whole.reshape(self.world, *shape)))

    def saw_schedule(self, schedule: Any, by_design: int) -> None:  # noqa: ANN401
        """Count the steps of each learning-rate schedule for one step of the optimizer, of which some are by design."""
        if self.active and self.step is not None:
            self.scheduled[id(schedule)] = self.scheduled.get(id(schedule), 0) + 1
            self.step.schedule_steps = max(self.scheduled.values())
            self.step.schedule_steps_by_design = by_design

    def saw_metric(self, metric: Any) -> None:  # noqa: ANN401
        """Note what a schedule that follows a metric is given."""
        if self.active and self.step is not None:
            self.step.metrics.append(float(metric))

    def saw_epoch(self, sampler: Any) -> None:  # noqa: ANN401
        """Note that a shuffling sampler begins an epoch, and whether steps were taken in that epoch before."""
        if not self.active or not getattr(sampler, "shuffle", False):
            return
        taken = self.number + self.stepped
        epoch, before = self.epochs.get(id(sampler), (None, 0))
        if epoch == sampler.epoch and taken > before:
            self.epoch_again = sampler.epoch
        self.epochs[id(sampler)] = sampler.epoch, taken

    # The steps

    def _root(self, module: nn.Module) -> int:
        """Return the number of the outermost module. Its parameters are noted at its first call."""
        bare = unwrapped(module)
        if self._wrapped_since(module):
            self._forget()
        for number, root in enumerate(self.roots):
            if root is bare:
                return number
        outer = wrapper_around(module) or module
        if self.number and any(_is_copy(bare, root) for root in self.roots):
            self.refuse("copies of a model are made and trained within a step, as in meta-learning")
        self.roots.append(bare)
        self.outers.append(outer)
        self.held_by.append([id(p) for p in module.parameters()])
        number = len(self.roots) - 1
        for wrapper in wrappers_in(outer):
            if wrapper not in self.wrappers:
                self.wrappers.append(wrapper)
                if wrapper == "FullyShardedDataParallel":
                    _observe_clipping_of_fsdp1(self)
        prefix = "" if number == 0 else f"root{number}."
        try:
            self._note_parameters(outer if unwrapped(outer) is bare else module, prefix)
            self.root_of |= {name: number for name in self.parameters.keys() - self.root_of.keys()}
            self.partners = self.partners or partners(module)
            if engine_in(outer) is not None and unwrapped(outer) is not bare:
                raise CannotTellError("the script calls a part of a DeepSpeed engine's model, not the engine")
        except CannotTellError as reason:
            self.refuse(str(reason))
        return number

    def _wrapped_since(self, module: nn.Module) -> bool:
        """Return whether the script, before its first step, has wrapped a module after it had called it."""
        if self.number or self.stepped or self.optimizers:
            return False
        for root, outer, held in zip(self.roots, self.outers, self.held_by, strict=True):
            if root is unwrapped(module):
                return (module is not outer and module is not root) or held != [id(p) for p in module.parameters()]
        return False

    def _look_for_wrappers(self) -> None:
        """Note wrappers that the script has put around modules since, and calls past."""
        for number, root in enumerate(self.roots):
            around = wrapper_around(root) if self.outers[number] is root else None
            if around is not None:
                self.outers[number], self.bypassed = around, type(around).__name__
                self.wrappers += [name for name in wrappers_in(around) if name not in self.wrappers]
                if engine_in(around) is not None:
                    self.refuse("the script calls a model, makes a DeepSpeed engine of it, and then calls past that")

    def _forget(self) -> None:
        """Forget the modules that were called so far. The script has only tried them out."""
        self.roots, self.outers, self.held_by, self.wrappers, self.copies = [], [], [], [], {}
        self.parameters, self.names, self.flats, self.pieces, self.ends = {}, {}, {}, {}, {}
        self.root_of, self.trained_roots, self.attributes_at_first = {}, set(), {}
        self.step = None

    def _note_parameters(self, module: nn.Module, prefix: str) -> None:
        flats = flat_pieces(module)
        engine = engine_in(module)
        if engine is not None:
            refuse_unseen(engine)
            observe_clipping(engine, self.saw_clip)
            observe_scaling(engine, self.saw_scaling)
            flats |= zero_pieces(engine)
        for name, (flat, place, piece) in flats.items():
            self.flats[prefix + name] = flat, place
            self.pieces[prefix + name] = piece
            self.parameters[prefix + name] = flat
        for name, parameter in named_parameters(module).items():
            self.device = parameter.device.type
            if name in flats:  # with use_orig_params the optimizer holds these
                self.names.setdefault(id(parameter), prefix + name)
            elif id(parameter) not in self.names and "_flat_param" not in name:
                self.names[id(parameter)] = prefix + name
                self.parameters[prefix + name] = parameter
                self.pieces[prefix + name] = piece_of(prefix + name, parameter)
            elif self.names.get(id(parameter), prefix + name) != prefix + name:
                self.aliases[prefix + name] = self.names[id(parameter)]

    def _begin(self, root: int, module: nn.Module, args: Any, kwargs: Any) -> Call:  # noqa: ANN401
        """Begin the record of a call of the outermost module, and of a new step if the optimizer has stepped since the
        last call.
        """
        if self.stepped:
            self._close()
        if self.step is None:
            self.step = Step(epoch_again=self.epoch_again)
            self.epoch_again, self.scaled = None, []
            if not self.number:
                self.began = time.perf_counter()
            self.step.changed = any(self._differs(n, self.last[n]) for n in self.parameters if n in self.last)
            if self.last.keys() != self.parameters.keys() or self.step.changed:
                self.step.before = self._values()
            self.marks = self._marks()
        elif new := self.parameters.keys() - (self.step.before or self.last).keys():  # of a model not called before
            self.step.before = (self.step.before or self.last) | self._values(new)
            self.marks = self._marks() | self.marks
        if root not in self.copies and self.rank == 0:
            outer = self.outers[root]
            self.copies[root] = bare_copy(outer if unwrapped(outer) is self.roots[root] else module)
        bare, outer = unwrapped(module), self.outers[root]
        if module is bare and outer is not bare and unwrapped(outer) is not self.inside_loop:
            self.bypassed = type(outer).__name__
        call = Call(
            root=root,
            inputs=with_tensors((args, dict(kwargs)), _kept),
            random_state=torch.get_rng_state(),
            host_random=host_random(),
            training=[m.training for _, m in bare_modules(bare)],
            refrozen=self._refrozen(root, bare),
            autocast=self._autocast(),
            of_inputs=any(t.is_leaf and t.requires_grad for t in tensors_in((args, kwargs))),
            buffers=_buffers(bare),
            attributes=self._changed_attributes(root, bare),
            weights=self._changed_weights(self.parameters),
        )
        self.step.calls.append(call)
        self.inner_terms = []
        self.opened, self.entered = (call, bare), module is bare
        self.given = [id(t) for t in tensors_in((args, kwargs))]
        for tensor in tensors_in((args, kwargs)):
            if tensor.grad_fn is not None:  # made by another module that was called before
                for _, earlier, number in self._ends_before([(tensor.grad_fn, tensor.output_nr)]):
                    earlier.used.add(number)
                    earlier.feeds = True
        return call

    def _refrozen(self, root: int, bare: nn.Module) -> dict[str, bool]:
        """Return which parameters have been frozen or unfrozen since a module was first called."""
        now = {name: p.requires_grad for name, p in named_parameters(bare).items()}
        first = self.trains_at_first.setdefault(root, now)
        return {name: trains for name, trains in now.items() if first.get(name, trains) != trains}

    def _changed_attributes(self, root: int, bare: nn.Module) -> dict[tuple[str, ...], Any]:
        """Return plain attributes of modules that have changed since a module was first called."""
        now = plain_attributes(bare)
        if root not in self.attributes_at_first:
            self.attributes_at_first[root] = kept(now)
        first = self.attributes_at_first[root]
        return {path: kept(x) for path, x in now.items() if path not in first or not is_same(x, first[path])}

    def _observe_outputs(self, call: Call, outputs: Any) -> None:  # noqa: ANN401
        for number, output in enumerate(t for t in tensors_in(outputs) if t.requires_grad and t.grad_fn is not None):
            if is_dtensor(output) and not all(p.is_replicate() for p in output.placements):  # type: ignore[attr-defined]
                call.output_pieces[number] = piece_of(f"output {number}", output)
                call.outputs.append(_kept(output))
            else:
                call.outputs.append(sketch(local(output)))
            call.gradients.append(None)
            self.ends[id(output.grad_fn), output.output_nr] = output.grad_fn, call, number
            for term, end in self.inner_terms:
                if end == (id(output.grad_fn), output.output_nr):
                    term.inside = False
            output.register_hook(functools.partial(self._saw_gradient, call, number))  # type: ignore[no-untyped-call]

    def _saw_gradient(self, call: Call, number: int, gradient: Tensor) -> None:
        if self.active:
            with self._timed():
                if is_dtensor(gradient):
                    placed: Any = gradient
                    if any(p.is_partial() for p in placed.placements):
                        self.refuse("the gradient that enters an output is a sum that ranks have not added up yet")
                    call.gradient_pieces[number] = piece_of(f"output {number}", gradient)
                new, old = _kept(gradient), call.gradients[number]
                call.gradients[number] = new if old is None else old + new
                call.entering, self.entering = self.entering, 1.0

    def _look_past_outputs(self, tensors: Iterable[Tensor]) -> None:
        """Note which outputs enter the loss, and refuse a loss that reaches parameters in another way.

        An output may be computed from another, as a loss from logits. The gradient that enters the latter then
        includes the former's.
        """
        used = self._ends_before([(t.grad_fn, t.output_nr) for t in tensors if t.grad_fn is not None])
        for _, call, number in used:
            call.used.add(number)
        if len(used) > 1:
            for node, call, _ in used:
                inner = self._ends_before([pair for pair in node.next_functions if pair[0] is not None], leaves=True)
                if any(call is c and n in call.used for _, c, n in inner):
                    call.nested = True

    def _ends_before(self, queue: list[tuple[Any, int]], leaves: bool = False) -> list[tuple[Any, Call, int]]:
        """Return the model outputs that are met first on the way back from some nodes of the autograd graph."""
        seen = set[tuple[Any, int]]()
        found = []
        while queue:
            node, number = queue.pop()
            if (node, number) in seen:
                continue
            seen.add((node, number))
            if (id(node), number) in self.ends:
                found.append(self.ends[id(node), number])
                continue
            if (id(node), number) in self.old_ends:
                if self._carried_over(self.old_ends[id(node), number][1]):
                    found.append(self.ends[id(node), number])
                    continue
                self.refuse(
                    "an output of a model enters losses of two optimizer steps; a step is judged by the calls since "
                    "the step before"
                )
                break
            if len(seen) > MOST_NODES:
                self.refuse(f"more than {MOST_NODES:,} operations lie between the model's outputs and the loss")
                break
            variable = getattr(node, "variable", None)
            if isinstance(variable, nn.Parameter) and not leaves:
                name = self.names.get(id(variable)) or self._name_of(variable)
                if self.differentiates:
                    self.refuse(DIFFERENTIATES)
                elif name is None or self.step is None:
                    self.refuse(beside_outputs(name or f"a parameter of shape {tuple(variable.shape)}"))
                else:  # it may be a penalty on weights, which the judge can tell
                    self.step.beside.add(name)
                    continue
                break
            queue += [(inner, nr) for inner, nr in node.next_functions if inner is not None]
        return found

    def _name_of(self, parameter: nn.Parameter) -> str | None:
        """Return the name of a parameter that a wrapper has put in the place of that which was noted, as FSDP2 does."""
        for number, root in enumerate(self.roots):
            for name, own in named_parameters(root).items():
                if own is parameter:
                    return name if number == 0 else f"root{number}.{name}"
        return None

    def _carried_over(self, call: Call) -> bool:
        """Count a call of the step before as one of this step, and return whether that is possible.

        A generator's images may serve two steps: detached for the discriminator's, and then for its own.
        """
        if self.step is None or any(g is not None for g in call.gradients):
            return False
        self.step.calls.insert(0, call)
        own = [key for key, (_, of, _) in self.old_ends.items() if of is call]
        self.ends |= {key: self.old_ends.pop(key) for key in own}
        return True

    def _note_term(self, name: str, args: Any, kwargs: Any, result: Tensor) -> None:  # noqa: ANN401
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        if not isinstance(target, Tensor):
            return
        weight = kwargs.get("weight", args[2] if len(args) > 2 and isinstance(args[2], Tensor) else None)
        if name in ("cross_entropy", "nll_loss") and not target.is_floating_point():
            counted = target != kwargs.get("ignore_index", -100)
        else:
            counted = torch.ones(target.shape, dtype=torch.bool)
            if name == "cross_entropy":  # probabilities: one target a row
                counted = counted.select(1 if target.dim() > 1 else 0, 0)
        reduction = kwargs.get("reduction", "mean")
        legacy = kwargs.get("reduce"), kwargs.get("size_average")
        if reduction not in ("mean", "sum", "none") or legacy != (None, None):
            return
        term = Term(
            name=name,
            reduction=reduction,
            scored=_kept(counted),
            targets=unordered_digest(target),
            constant=float(target.reshape(-1)[0])
            if target.numel() and bool((target == target.reshape(-1)[0]).all())
            else None,
            weighted=weight is not None,
            inside=self.inside_model,
        )
        if term.inside:
            self.inner_terms.append((term, (id(result.grad_fn), result.output_nr)))
        result.register_hook(functools.partial(self._saw_term_gradient, term))  # type: ignore[no-untyped-call]
        self.terms[result.grad_fn, result.output_nr] = term
        if self.step is not None and self.step.calls:
            self.step.calls[-1].terms.append(term)

    def _note_operations(self, tensors: Iterable[Tensor]) -> None:
        """Note what is computed between the model's outputs and what is differentiated."""
        if self.step is None:
            return
        queue = [(t.grad_fn, t.output_nr, False) for t in tensors if t.grad_fn is not None]
        seen = set[tuple[Any, int, bool]]()
        while queue and len(seen) < MOST_NODES:
            node, number, in_term = queue.pop()
            if (node, number, in_term) in seen:
                continue
            seen.add((node, number, in_term))
            if (id(node), number) in self.ends or hasattr(node, "variable"):
                continue
            in_term = in_term or (node, number) in self.terms
            factor = _factor_of(node)
            self.step.operations.add((node.name(), float(factor) if in_term and factor is not None else None))
            queue += [(inner, nr, in_term) for inner, nr in node.next_functions if inner is not None]

    def _look_for_multipliers(self, tensors: Iterable[Tensor]) -> None:
        """Note the numbers by which results of loss functions are multiplied on the way to what is differentiated."""
        queue: list[tuple[Any, int, float]] = [
            (t.grad_fn, t.output_nr, 1.0 / self.scale) for t in tensors if t.grad_fn is not None
        ]
        seen = set[tuple[Any, int]]()
        while queue and len(seen) < MOST_NODES:
            node, number, product = queue.pop()
            if (node, number) in seen:
                continue
            seen.add((node, number))
            if term := self.terms.pop((node, number), None):
                term.multiplied = product
                continue
            if (id(node), number) in self.ends:
                for term in self.ends[id(node), number][1].terms:
                    if term.inside:
                        term.multiplied = product
                continue
            if node.name() == "MulBackward0" and (factor := _factor_of(node)) is not None:
                product *= float(factor)
            queue += [(inner, nr, product) for inner, nr in node.next_functions if inner is not None]

    def _saw_term_gradient(self, term: Term, gradient: Tensor) -> None:
        if self.active:
            term.gradient = _kept(gradient)

    def scaler_skipped(self) -> None:
        """Discard what was recorded of a step that a `GradScaler` skipped."""
        if self.step is not None and not self.step.groups:
            self.step = Step(before=self.step.before, skipped=self.step.skipped + 1)

    def _close(self) -> None:
        """Write the step that has ended. Raise `EnoughError` after the last one."""
        assert self.step is not None
        step, self.step, self.stepped = self.step, None, False
        self.scheduled = {}
        if not self.reason:
            try:
                self.left -= self.folder.write_step(self.rank, self.number, step, self.left)
                self.number += 1
                self.num_calls.append(len(step.calls))
            except (OSError, TypeError, AttributeError, ValueError) as error:
                self.refuse(f"a step cannot be recorded: {type(error).__name__}: {error}")
        self.old_ends, self.ends, self.terms = self.ends, {}, {}
        if self.reason or self._is_enough():
            self._stop()
        self.folder.write_facts(self._facts("still running"), so_far=True)

    def _stop(self) -> NoReturn:
        """End the script, once all ranks have come so far."""
        self.active = False
        self.met = self.folder.meet(self.rank, self.world, MEET_SECONDS)
        self.over = True
        raise EnoughError

    def end_again(self) -> None:
        """End a script that has caught `EnoughError` and begins another step, as one that skips bad batches does."""
        if not self.over:
            return
        self.swallowed += 1
        if self.swallowed > MOST_SWALLOWED and self.conclude:
            self.conclude()
        raise EnoughError

    def _is_enough(self) -> bool:
        """Return whether every optimizer has taken its steps. Those that take turns get twice as many in all."""
        few = min(self.taken.values(), default=0) < self.steps
        return self.number >= (2 * self.steps if few else self.steps)

    def refuse(self, reason: str) -> None:
        """Record why no verdict can be given. The script ends at its next step."""
        self.reason = self.reason or reason

    def finish(self, end: str, detail: str = "") -> None:
        """Write the facts about this rank that the judge needs."""
        with contextlib.suppress(EnoughError):
            if self.active and self.stepped:
                self._close()
        self.active = False
        self.folder.write_facts(self._facts(end, detail))

    def _facts(self, end: str, detail: str = "") -> Facts:
        return Facts(
            rank=self.rank,
            world=self.world,
            wrappers=self.wrappers,
            bypassed=self.bypassed,
            partners=self.partners,
            gradient_pieces=self.gradient_pieces,
            partial=self.partial,
            pieces=self.pieces,
            trained=[
                n for n, p in self.parameters.items() if p.requires_grad and self.root_of.get(n) in self.trained_roots
            ],
            hooks=communication_hooks(self.outers),
            sums_narrow=self.sums_narrow,
            held=sorted(self.held),
            aliases=self.aliases,
            strangers=self.strangers,
            device=self.device,
            attributes=self.attributes_at_first,
            dtypes={n: p.dtype for n, p in self.parameters.items()},
            end="refused" if self.reason else end,
            detail=self.reason or detail,
            script_seconds=self.ended - self.began,
            record_seconds=self.record_seconds,
            num_steps=self.number,
            num_calls=self.num_calls,
            blind_steps=self.blind_steps,
        )

    # Tensors of this rank

    def _held(self, parameters: Iterable[Tensor]) -> list[str]:
        """Return the names of the parameters that an optimizer holds; a flat parameter has several."""
        found = []
        for p in parameters:
            flat = [name for name, (own, _) in self.flats.items() if own is p]
            found += flat or ([self.names[id(p)]] if id(p) in self.names else [])
        return found

    def _values(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        wanted = self.parameters if names is None else names
        return {name: _kept(self._part(name, local(self.parameters[name]))) for name in wanted}

    def _marks(self) -> dict[str, tuple[int, ...]]:
        """Return marks of every parameter, which a write changes.

        A write to a DTensor does not change its local tensor's version, nor one to the local tensor the DTensor's. What
        is written to parts of FSDP1's flat parameters changes none of the marks.
        """
        own = {name: (p, getattr(p, "_local_tensor", p)) for name, p in self.parameters.items()}
        return {name: (*_mark(part), p._version) for name, (p, part) in own.items()}

    def _changed_weights(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return those of `names` that something has changed since the step began, other than an optimizer's step."""
        now, held = self._marks(), (self.step.before if self.step is not None else {}) or self.last
        written = [n for n in names if n in held and (n in self.flats or now[n] != self.marks[n])]
        return self._values(n for n in written if self._differs(n, held[n]))

    def _differs(self, name: str, value: Tensor) -> bool:
        """Return whether a parameter has another value than this one."""
        return not _same(self._part(name, local(self.parameters[name])).cpu(), value)

    def _gradient_marks(self) -> dict[str, tuple[int, ...]]:
        """Return marks of all gradients, which a write changes."""
        graded = [(name, p.grad) for name, p in self.parameters.items() if p.grad is not None]
        return {name: (*_mark(local(gradient)), gradient._version) for name, gradient in graded}

    def _gradients(self, names: Iterable[str]) -> dict[str, Tensor]:
        found = {}
        for name in names:
            gradient = self.parameters[name].grad
            if gradient is None:
                continue
            if is_dtensor(gradient):
                placed: Any = gradient
                if placed.placements != getattr(self.parameters[name], "placements", None):
                    self.gradient_pieces[name] = piece_of(name, gradient)
                if any(p.is_partial() for p in placed.placements):
                    self.partial.add(name)
            own = local(gradient)
            found[name] = _kept(self._part(name, own.to_dense() if own.is_sparse else own))
        return found

    def _state(self, name: str, parameter: Tensor, value: Any) -> Any:  # noqa: ANN401
        """Return a copy of what an optimizer stores for a parameter, or for a part of a flat one."""
        whole = isinstance(value, Tensor) and value.numel() == parameter.numel() and value.dim()
        return _kept(self._part(name, local(value)) if whole else value)

    def _part(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self.flats:
            return tensor
        return tensor.reshape(-1)[self.flats[name][1]]

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        except Exception as error:  # the script must not fail because it is observed
            self.refuse(
                f"Meshmark failed while it recorded the script ({type(error).__name__}: {error}); please report this"
            )
        finally:
            self.record_seconds += time.perf_counter() - begin


def sketch(output: Tensor) -> Tensor:
    """Return the first elements of an output, and its norm."""
    flat = output.detach().reshape(-1).double()
    return torch.cat([flat[:SKETCHED], flat.norm().reshape(1)]).cpu()


def beside_outputs(name: str) -> str:
    """Return why a loss that reaches the parameter `name` by another way cannot be judged."""
    return (
        f"the loss reaches {name} by another way than the outputs of a module that the script calls, and not by a "
        "penalty on weights: a value kept as an attribute, or a part of a model that is called by itself?"
    )


def runs_the_loop(module: nn.Module) -> bool:
    """Return whether this call of a LightningModule is its `training_step`, with manual optimization.

    It then holds forward, backward and the optimizer's step. What it calls is a script's outermost module.
    """
    bare = unwrapped(module)
    return not getattr(bare, "automatic_optimization", True) and redirected_to(bare) is not None


def _frames() -> Iterator[types.FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_functional(args: Any, kwargs: Any) -> bool:  # noqa: ANN401
    """Return whether a call is one of `torch.func`'s: `functional_call`, or inside a transform such as `vmap`.

    The module's parameters, or its inputs, are then others than the script's for the time of the call.
    """
    for frame in _frames():
        if frame.f_code.co_name == "_functional_call" and frame.f_globals.get("__name__") == "torch.nn.utils.stateless":
            return True
    return any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors_in((args, kwargs)))


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {
        (f"{prefix}.{name}" if prefix else name): _kept(buffer)
        for prefix, inner in bare_modules(module)
        for name, buffer in inner._buffers.items()
        if buffer is not None
    }


def _kept(value: Any) -> Any:  # noqa: ANN401
    """Return a copy on the CPU that later steps do not change."""
    return local(value).cpu().clone() if isinstance(value, Tensor) else value


def _state_mark(state: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells whether an optimizer's state of a parameter was written to."""
    return tuple(sorted((k, _mark(local(v))) for k, v in state.items() if isinstance(v, Tensor)))


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes."""


def _mark(tensor: Tensor) -> tuple[int, int, int]:
    """Return address, version, and the sum of the bits of a tensor. A write to its `.data` changes the sum alone."""
    values = tensor.detach()
    values = values._values() if values.is_sparse else values
    address = id(tensor) if tensor.is_sparse else values.data_ptr()
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    try:
        is_there = values.device.type != "meta" and values.untyped_storage().nbytes() > 0  # FSDP frees what it gathered
        bits = int(values.contiguous().view(_BITS[values.element_size()]).sum(dtype=torch.int64)) if is_there else 0
    except (RuntimeError, NotImplementedError, KeyError):  # a subclass of tensors whose bits cannot be read
        bits = 0
    return address, tensor._version, bits


def _plain(value: Any) -> Any:  # noqa: ANN401
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _same(a: Tensor, b: Tensor) -> bool:
    return (a.dtype is b.dtype and torch.equal(a, b)) or (
        a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    )


def install(recorder: Recorder) -> None:
    """Install the hooks. Call this before the script's first line."""
    call = nn.Module.__call__

    def observed_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if torch.compiler.is_compiling():
            return call(module, *args, **kwargs)
        return recorder.around_call(call, module, args, kwargs)

    nn.Module.__call__ = observed_call  # type: ignore[method-assign]

    backward = torch.autograd.backward

    @functools.wraps(backward)
    def observed_backward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return recorder.around_backward(backward, args, kwargs)

    torch.autograd.backward = observed_backward

    grad = torch.autograd.grad

    @functools.wraps(grad)
    def observed_grad(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        recorder.differentiates |= bool(kwargs.get("create_graph") or (len(args) > 4 and args[4]))
        return grad(*args, **kwargs)

    torch.autograd.grad = observed_grad

    for name in LOSSES:
        setattr(F, name, _observed_loss(recorder, name, getattr(F, name)))

    clip = nn.utils.clip_grad_norm_

    @functools.wraps(clip)
    def observed_clip(parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        recorded = recorder.before_clip(parameters, max_norm, norm_type)
        norm = clip(parameters, max_norm, norm_type, *args, **kwargs)
        if recorded is not None and type(norm) is Tensor:  # that of sharded gradients is not added up over ranks yet
            recorded.acts = not float(norm) <= max_norm
        return norm

    nn.utils.clip_grad_norm_ = nn.utils.clip_grad.clip_grad_norm_ = observed_clip

    clip_values = nn.utils.clip_grad_value_

    @functools.wraps(clip_values)
    def observed_clip_value(parameters: Any, clip_value: float, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        recorder.before_clip(parameters, clip_value, by_value=True)
        return clip_values(parameters, clip_value, *args, **kwargs)

    nn.utils.clip_grad_value_ = nn.utils.clip_grad.clip_grad_value_ = observed_clip_value

    _observe_scaler(recorder)
    _observe_schedules(recorder)
    _observe_epochs(recorder)
    _observe_collectives(recorder)
    _refuse_spawning()
    compiled = torch.compile

    @functools.wraps(compiled)
    def observed_compile(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        recorder.stay_uncompiled()
        return compiled(*args, **kwargs)

    torch.compile = observed_compile
    _observe_steps(recorder)
    for owner in (nn.Module, Optimizer):
        owner.zero_grad = _observed_clear(recorder, owner.zero_grad)  # type: ignore[method-assign]


def _constant(tensor: Tensor) -> float | None:
    """Return the value of all elements, or None if there are several."""
    values = tensor.detach().reshape(-1)
    return float(values[0]) if values.numel() and bool((values == values[0]).all()) else None


def _is_copy(module: nn.Module, other: nn.Module) -> bool:
    """Return whether a module looks like a copy of another."""
    shapes = ([(name, p.shape) for name, p in named_parameters(each).items()] for each in (module, other))
    return type(module) is type(other) and len({tuple(own) for own in shapes}) == 1


def _observed_clear(recorder: Recorder, clear: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(clear)
    def observed(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        recorder.saw_clear()
        clear(self, *args, **kwargs)

    return observed


def _observe_steps(recorder: Recorder) -> None:
    """Observe every optimizer's step, after the script's own hooks before it and before those after it.

    Hooks of all optimizers run before an optimizer's own, which may clip or set the learning rate. They therefore only
    put the recorder's hooks last and first among the optimizer's own.
    """

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:  # noqa: ANN401
        return recorder.before_step(optimizer, args, kwargs)

    def after(optimizer: Optimizer, *_: Any) -> None:  # noqa: ANN401
        recorder.after_step(optimizer)

    def arrange(optimizer: Optimizer, *_: Any) -> None:  # noqa: ANN401
        recorder.before_hooks(optimizer, before, after)

    register_optimizer_step_pre_hook(arrange)


def _observe_clipping_of_fsdp1(recorder: Recorder) -> None:
    """Observe FSDP1's own `clip_grad_norm_`, which its documentation asks for. It may call PyTorch's."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    clip = FullyShardedDataParallel.clip_grad_norm_

    @functools.wraps(clip)
    def observed(self: Any, max_norm: float, norm_type: float = 2.0) -> Any:  # noqa: ANN401
        recorder.before_clip(list(self.parameters()), max_norm, norm_type)
        with recorder.unseen_clipping():
            return clip(self, max_norm, norm_type)

    FullyShardedDataParallel.clip_grad_norm_ = observed  # type: ignore[method-assign]


def _observed_loss(recorder: Recorder, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def observed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        result = function(*args, **kwargs)
        if not torch.compiler.is_compiling():
            recorder.saw_loss(name, args, kwargs, result)
        return result

    return observed


def _observe_scaler(recorder: Recorder) -> None:
    scaler: Any = torch.amp.GradScaler
    scale, unscale, step = scaler.scale, scaler.unscale_, scaler.step

    def observed_scale(self: Any, outputs: Any) -> Any:  # noqa: ANN401
        found = scale(self, outputs)
        if self.is_enabled():
            recorder.scale, recorder.unscaled = float(self.get_scale()), False
            recorder.scaled += [t.grad_fn for t in tensors_in(found)]
        return found

    def observed_unscale(self: Any, optimizer: Any) -> Any:  # noqa: ANN401
        found = unscale(self, optimizer)
        recorder.unscaled = True
        return found

    def observed_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        found = step(self, optimizer, *args, **kwargs)
        if recorder.active and not recorder.stepped and self.is_enabled():
            recorder.scaler_skipped()
        return found

    scaler.scale, scaler.unscale_, scaler.step = observed_scale, observed_unscale, observed_step


COLLECTIVES = ("all_gather", "all_gather_into_tensor", "all_reduce", "broadcast")
_GRADIENTS_PASS = ("torch.distributed", "torch.nn.parallel", "deepspeed", "fairscale")
"""Modules whose own collectives are part of their backward pass or of their wrapping."""


def _observe_collectives(recorder: Recorder) -> None:
    """Observe collectives that the script calls itself, through which no gradient passes."""
    import torch.distributed as dist

    if not dist.is_available():
        return

    def observed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            frame = inspect.currentframe()
            caller = str(frame.f_back.f_globals.get("__name__", "")) if frame and frame.f_back else ""
            if not caller.startswith(_GRADIENTS_PASS):
                recorder.saw_collective(name, tensors_in((args, kwargs)), _function_around(frame))
            return function(*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, observed(name, getattr(dist, name)))


def _function_around(frame: types.FrameType | None) -> Any:  # noqa: ANN401
    """Return the context of the `torch.autograd.Function` whose forward pass holds a frame. None if there is none."""
    while frame is not None:
        if frame.f_code.co_name == "forward" and frame.f_code.co_argcount:
            first = frame.f_locals.get(frame.f_code.co_varnames[0])
            if isinstance(first, torch.autograd.function.BackwardCFunction):
                return first
        frame = frame.f_back
    return None


def _observe_schedules(recorder: Recorder) -> None:
    schedule: Any = torch.optim.lr_scheduler.LRScheduler
    step = schedule.step

    @functools.wraps(step)
    def observed_step(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        recorder.saw_schedule(self, _steps_by_design(inspect.currentframe()))
        return step(self, *args, **kwargs)

    schedule.step = observed_step

    plateau: Any = torch.optim.lr_scheduler.ReduceLROnPlateau
    follow = plateau.step

    @functools.wraps(follow)
    def observed_metric(self: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        recorder.saw_metric(metrics)
        return follow(self, metrics, *args, **kwargs)

    plateau.step = observed_metric


def _steps_by_design(frame: types.FrameType | None) -> int:
    """Return how many steps a schedule takes at once by design, given the frame that observes it.

    Accelerate's prepared schedules take one for each process: they are to be made for the steps of one process.
    """
    caller = frame.f_back if frame is not None else None
    if caller is None or caller.f_globals.get("__name__") != "accelerate.scheduler":
        return 1
    return int(caller.f_locals.get("num_processes", 1))  # absent if batches are split


def _observe_epochs(recorder: Recorder) -> None:
    sampler: Any = torch.utils.data.DistributedSampler
    begin = sampler.__iter__

    @functools.wraps(begin)
    def observed(self: Any) -> Any:  # noqa: ANN401
        recorder.saw_epoch(self)
        return begin(self)

    sampler.__iter__ = observed


class SpawnsError(BaseException):
    """The script starts processes of its own, which cannot be observed."""


def _refuse_spawning() -> None:
    import torch.multiprocessing as mp

    def refused(*_: Any, **__: Any) -> NoReturn:  # noqa: ANN401
        raise SpawnsError(
            "the script starts its own ranks (torch.multiprocessing.spawn); let it take RANK and WORLD_SIZE from the "
            "environment, as under torchrun"
        )

    for name in ("spawn", "start_processes"):
        setattr(mp, name, refused)


def _factor_of(node: Any) -> Tensor | None:  # noqa: ANN401
    """Return the number by which an operation of the autograd graph multiplies or divides, or None."""
    if node.name() not in ("MulBackward0", "DivBackward0") or None not in (f[0] for f in node.next_functions):
        return None
    other = node._saved_other if node.next_functions[1][0] is None else node._saved_self
    return other if isinstance(other, Tensor) and other.numel() == 1 else None
