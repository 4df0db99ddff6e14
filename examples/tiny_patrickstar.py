"""PatrickStar in 300 lines, with the bits of plain PyTorch. docs/architecture.md goes through it section by section."""

from __future__ import annotations

import copy
import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import partial

import torch
from torch import Tensor, nn

# ---- 1. Chunks: parameters are packed into flat arrays of one size, which move as a whole.
Layout = dict[nn.Parameter, tuple[int, int]]  # parameter -> its chunk, its first element there


def pack(model: nn.Module, chunk_numel: int) -> Layout:
    """Packs in registration order, in which most models also use their parameters."""
    layout, chunk, start = Layout(), 0, 0
    for name, param in model.named_parameters():
        if param.dtype != torch.float32 or not param.requires_grad:
            raise ValueError(
                f"{name} is {param.dtype}, or frozen: only float32 parameters that are trained can be packed"
            )
        if param.numel() > chunk_numel:
            raise ValueError(f"{name} has {param.numel()} elements, a chunk {chunk_numel}: raise chunk_numel")
        if start + param.numel() > chunk_numel:
            chunk, start = chunk + 1, 0
        layout[param] = chunk, start
        start += param.numel()
    return layout


# ---- 2. A simulated device: its memory has a limit, and bytes that cross its link are counted.
class Device:
    """Owns the memory of device tensors. All numbers are bytes."""

    def __init__(self, budget: int) -> None:
        self.budget, self.used, self.peak, self.moved = budget, 0, 0, 0

    def allocate(self, tensor: Tensor) -> None:
        """Gives the tensor's storage zeroed memory, which all its views share, including those saved by autograd."""
        if self.used + tensor.nbytes > self.budget:
            raise MemoryError(f"{self.used} of {self.budget} bytes are taken, {tensor.nbytes} do not fit: raise budget")
        tensor.untyped_storage().resize_(tensor.nbytes)
        tensor.zero_()
        self.used += tensor.nbytes
        self.peak = max(self.peak, self.used)

    def free(self, tensor: Tensor) -> None:
        """Frees the memory. Views remain, and must not be read before memory is allocated again."""
        self.used -= tensor.untyped_storage().nbytes()
        tensor.untyped_storage().resize_(0)


# ---- 3. Programs: instructions on chunks, and one table of what each instruction does to arrays.
Kind = Enum("Kind", "PARAM GRAD HOST_GRAD MASTER MOMENTUM VARIANCE")  # the arrays of a chunk
Op = Enum("Op", "FETCH EVICT FORWARD BACKWARD GRAD_TO_HOST UPDATE")
Array, Instruction = tuple[Kind, int], tuple[Op, int]  # (kind, chunk), (operation, chunk)
ON_DEVICE, STATES = (Kind.PARAM, Kind.GRAD), (Kind.MASTER, Kind.MOMENTUM, Kind.VARIANCE)
EFFECTS = {  # queue, then the kinds of arrays that are read, written, freed
    Op.FETCH: ("upload", (Kind.MASTER,), (Kind.PARAM,), ()),
    Op.EVICT: (None, (Kind.PARAM,), (), (Kind.PARAM,)),  # copies nothing: the master has the values
    Op.FORWARD: ("compute", (Kind.PARAM,), (), ()),
    Op.BACKWARD: ("compute", (Kind.PARAM,), (Kind.GRAD,), ()),
    Op.GRAD_TO_HOST: ("download", (Kind.GRAD,), (Kind.HOST_GRAD,), (Kind.GRAD,)),
    Op.UPDATE: ("host", (Kind.HOST_GRAD, *STATES), STATES, (Kind.HOST_GRAD, Kind.PARAM)),  # PARAM is out of date
}


# ---- 4. Two interpreters of programs: the Executor moves tensors, the Clock predicts bytes and time.
class Machine:
    """Tracks which arrays exist, and refuses to read others. Subclasses allocate memory and do the work."""

    def __init__(self, num_chunks: int, num_slots: int) -> None:
        self.num_slots = num_slots  # a slot is the device memory of one array
        self.present: dict[Array, None] = dict.fromkeys((kind, c) for c in range(num_chunks) for kind in STATES)

    def run(self, instructions: Iterable[Instruction]) -> None:
        """Runs the instructions in order."""
        for op, chunk in instructions:
            _, reads, writes, frees = EFFECTS[op]
            for kind in [kind for kind in reads if (kind, chunk) not in self.present]:
                raise RuntimeError(f"{op.name} of chunk {chunk} reads {kind.name}, which does not exist")
            for array in [(kind, chunk) for kind in writes if (kind, chunk) not in self.present]:
                if array[0] in ON_DEVICE:
                    self._allocate(array)
                self.present[array] = None
            self._perform(op, chunk)
            for array in [(kind, chunk) for kind in frees if (kind, chunk) in self.present]:
                if array[0] in ON_DEVICE:
                    self._free(array)
                del self.present[array]


class Executor(Machine):
    """Moves and updates tensors. FORWARD and BACKWARD are the model's own work, between calls of ``run``."""

    def __init__(self, layout: Layout, chunk_numel: int, device: Device, lr: float) -> None:
        num_chunks = 1 + max(chunk for chunk, _ in layout.values())
        super().__init__(num_chunks, device.budget // (4 * chunk_numel))
        self.layout, self.device, self.lr, self.num_steps = layout, device, lr, Counter[int]()
        self.tensors = {(kind, c): torch.zeros(chunk_numel) for kind in Kind for c in range(num_chunks)}
        for param in layout:
            self.view(Kind.MASTER, param).copy_(param.detach())
            param.data = self.view(Kind.PARAM, param)  # from now on its memory is allocated and freed with its chunk
        for array in [array for array in self.tensors if array[0] in ON_DEVICE]:
            self.tensors[array].untyped_storage().resize_(0)

    def view(self, kind: Kind, param: nn.Parameter) -> Tensor:
        """The parameter's part of an array, in the parameter's shape."""
        chunk, start = self.layout[param]
        return self.tensors[kind, chunk][start : start + param.numel()].view(param.shape)

    def _allocate(self, array: Array) -> None:
        self.device.allocate(self.tensors[array])

    def _free(self, array: Array) -> None:
        self.device.free(self.tensors[array])

    def _perform(self, op: Op, chunk: int) -> None:
        if op in (Op.FETCH, Op.GRAD_TO_HOST):
            _, (source,), (target,), _ = EFFECTS[op]
            self.tensors[target, chunk].copy_(self.tensors[source, chunk])
            self.device.moved += self.tensors[source, chunk].nbytes
        elif op is Op.UPDATE:
            self.num_steps[chunk] += 1
            for param in [param for param in self.layout if self.layout[param][0] == chunk]:
                self.adamw(self.num_steps[chunk], *(self.view(kind, param) for kind in (Kind.HOST_GRAD, *STATES)))

    def adamw(self, step: int, grad: Tensor, master: Tensor, momentum: Tensor, variance: Tensor) -> None:
        """The operations of ``torch.optim.AdamW(foreach=False)`` with its default options, in the same order."""
        master.mul_(1 - self.lr * 1e-2)
        momentum.lerp_(grad, 1 - 0.9)
        variance.mul_(0.999).addcmul_(grad, grad, value=1 - 0.999)
        denominator = (variance.sqrt() / (1 - 0.999**step) ** 0.5).add_(1e-8)
        master.addcdiv_(momentum, denominator, value=-(self.lr / (1 - 0.9**step)))


class Clock(Machine):
    """Simulates programs in numbers. Queues run concurrently; work waits for its arrays, a new array for a slot."""

    MILLISECONDS = {Op.FETCH: 3, Op.FORWARD: 1, Op.BACKWARD: 2, Op.GRAD_TO_HOST: 3, Op.UPDATE: 3}  # invented

    def __init__(self, num_chunks: int, num_slots: int) -> None:
        super().__init__(num_chunks, num_slots)
        self.peak = self.moved = 0  # arrays, all of one size
        self.free_since = [0] * num_slots  # a heap: the end of each free slot's last use
        self.queue_ends, self.array_ends = defaultdict[str, int](int), defaultdict[Array, int](int)

    def _allocate(self, array: Array) -> None:
        if not self.free_since:
            raise MemoryError(f"all {self.num_slots} slots are taken")
        self.array_ends[array] = heapq.heappop(self.free_since)
        self.peak = max(self.peak, self.num_slots - len(self.free_since))

    def _free(self, array: Array) -> None:
        heapq.heappush(self.free_since, self.array_ends[array])

    def _perform(self, op: Op, chunk: int) -> None:
        queue, reads, writes, _ = EFFECTS[op]
        if queue:
            arrays = [(kind, chunk) for kind in (*reads, *writes)]
            start = max(self.queue_ends[queue], *(self.array_ends[array] for array in arrays))
            self.queue_ends[queue] = start + self.MILLISECONDS[op]
            self.array_ends |= dict.fromkeys(arrays, self.queue_ends[queue])
            self.moved += queue in ("upload", "download")


# ---- 5. Plans: the accesses of one step, as hooks reported them, become a program for the next steps.
Access = tuple[Op, tuple[int, ...]]  # the model is about to do this work on these chunks
Program = list[list[Instruction]]  # one list for each access


def emit(access: Access, upcoming: Sequence[Access], machine: Machine) -> list[Instruction]:
    """Instructions for an access. ``upcoming`` is the rest of the step, or empty if it is unknown."""
    op, chunks = access
    if op is Op.GRAD_TO_HOST:  # planned steps update at once, others at their end
        return [(op, c) for c in chunks] + [(Op.UPDATE, c) for c in chunks if upcoming]
    if op is Op.UPDATE:
        return [(op, c) for kind, c in machine.present if kind is Kind.HOST_GRAD]
    _, reads, writes, _ = EFFECTS[op]
    missing = [(kind, c) for c in chunks for kind in reads + writes if (kind, c) not in machine.present]
    num_short = sum(kind in ON_DEVICE for kind, _ in machine.present) + len(missing) - machine.num_slots
    idle = [c for kind, c in machine.present if kind is Kind.PARAM and c not in chunks]  # in the order of their fetches
    next_uses = [c for _, used in upcoming for c in used] + idle[::-1]  # unknown uses: the newest first
    idle.sort(key=next_uses.index, reverse=True)  # Belady's rule: evict the farthest next use
    program = [(Op.EVICT, c) for c in idle[: max(0, num_short)]]
    return program + [(Op.FETCH, c) for kind, c in missing if kind is Kind.PARAM] + [(op, c) for c in chunks]


def make_plan(trace: Sequence[Access], clock: Clock) -> Program:
    """A program for steps equal to the traced one. The Clock simulates it, and so tracks which arrays exist."""
    program: Program = []
    for t, access in enumerate(trace):
        program.append(emit(access, trace[t + 1 :], clock))
        clock.run(program[-1])
    return program


def least_moves(trace: Sequence[Access], num_slots: int) -> int:
    """Arrays that any program must move. A chunk stays between two uses if there is room, the soonest use first."""
    room, last_use, grads, num_moves = [num_slots] * len(trace), dict[int, int](), set[int](), 0
    for t, (op, chunks) in enumerate(trace):
        num_moves += len(chunks)  # a fetch for each use, and each gradient once
        grads = grads.union(chunks) if op is Op.BACKWARD else grads.difference(chunks)
        for c in chunks if op in (Op.FORWARD, Op.BACKWARD) else ():
            between = range(last_use.get(c, t) + 1, t)
            if c in last_use and all(room[i] > 0 for i in between):
                num_moves -= 1
                room[between.start : t] = [room[i] - 1 for i in between]
            last_use[c] = t
        room[t] -= len(chunks) + len(grads)
    return num_moves


# ---- 6. The engine: hooks report accesses, and each access runs its instructions.
class TinyPatrickStar:
    """Trains ``model`` by AdamW, with at most ``budget`` bytes of parameters and gradients on the device."""

    def __init__(self, model: nn.Module, budget: int, chunk_numel: int, lr: float) -> None:
        layout = pack(model, chunk_numel)
        used = {m: tuple(sorted({layout[p][0] for p in m.parameters(recurse=False)})) for m in model.modules()}
        for name, module in model.named_modules():
            if used[module] and len(list(module.parameters())) > len(list(module.parameters(recurse=False))):
                raise ValueError(f"{name or 'the model'} has parameters beside submodules: put them into one of these")
            if budget < (least := len(used[module]) * len(ON_DEVICE) * 4 * chunk_numel):
                raise ValueError(f"budget is {budget} bytes, {name or 'the model'} needs {least}: raise budget")
        self.executor = Executor(layout, chunk_numel, Device(budget), lr)
        self.num_params, self.num_grads = Counter(chunk for chunk, _ in layout.values()), Counter[int]()
        self.trace, self.planned_trace, self.program = list[Access](), list[Access](), Program()
        for module in [module for module in used if used[module]]:
            module.register_forward_pre_hook(partial(self._access, Op.FORWARD, used[module]))
            module.register_forward_hook(partial(self._await_backward, used[module]))
        for param in layout:
            param.register_post_accumulate_grad_hook(self._take_gradient)

    def _access(self, op: Op, chunks: tuple[int, ...], *_: object) -> None:
        self.trace.append((op, chunks))
        if self.trace == self.planned_trace[: len(self.trace)]:
            self.executor.run(self.program[len(self.trace) - 1])
        else:  # the first step, or a plan miss: on demand
            self.executor.run(emit((op, chunks), (), self.executor))

    def _await_backward(self, chunks: tuple[int, ...], module: nn.Module, inputs: object, output: Tensor) -> None:
        if output.requires_grad:  # autograd calls the hook just before the module's backward
            output.register_hook(partial(self._access, Op.BACKWARD, chunks))

    def _take_gradient(self, param: nn.Parameter) -> None:
        chunk, _ = self.executor.layout[param]
        self.executor.view(Kind.GRAD, param).copy_(param.grad)
        param.grad = None
        self.num_grads[chunk] += 1
        if self.num_grads[chunk] == self.num_params[chunk]:
            self._access(Op.GRAD_TO_HOST, (chunk,))

    def step(self) -> tuple[int, int]:
        """Ends the step, and plans again after a plan miss. Returns the step's peak and bytes moved."""
        if self.num_grads != self.num_params:
            raise RuntimeError("each parameter must get one gradient in each step")
        self._access(Op.UPDATE, ())
        device = self.executor.device
        if self.trace != self.planned_trace:
            self.program = make_plan(self.trace, Clock(len(self.num_params), self.executor.num_slots))
        self.planned_trace, self.trace, self.num_grads = self.trace, [], Counter()
        result, device.peak, device.moved = (device.peak, device.moved), device.used, 0
        return result


# ---- 7. A small language model, trained twice: by plain PyTorch, and with an eighth of its bytes on the device.
def main() -> None:
    """Compares the two runs, and the Executor with the Clock."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)]
    plain = nn.Sequential(nn.Embedding(256, 64), *blocks, nn.LayerNorm(64), nn.Linear(64, 256, bias=False))
    plain[-1].weight = plain[0].weight  # tied: one chunk is used at both ends of the model
    model, num_bytes = copy.deepcopy(plain), 16 * sum(param.numel() for param in plain.parameters())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, foreach=False)
    engine = TinyPatrickStar(model, budget=num_bytes // 8, chunk_numel=16640, lr=1e-3)
    for step in range(5):
        tokens, targets = torch.randint(256, (2, 128))
        for trained in (plain, model):
            loss = nn.functional.cross_entropy(trained(tokens), targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        peak, moved = engine.step()
        print(f"step {step}: loss {loss.item():.3f}, peak {peak:,} of {num_bytes:,} bytes, moved {moved:,}")
    print("budget (arrays), peak, moved, Belady's least, milliseconds: a plan for any budget, played by the Clock")
    for n in (3, 4, 6, 8, 12, 20):
        make_plan(trace := engine.planned_trace, clock := Clock(len(engine.num_params), n))
        print(n, clock.peak, clock.moved, least_moves(trace, n), max(clock.queue_ends.values()), sep="\t")
    masters = [engine.executor.view(Kind.MASTER, param) for param in model.parameters()]
    print("bitwise equal to torch.optim.AdamW:", all(map(torch.equal, masters, plain.parameters())))


if __name__ == "__main__":
    main()
