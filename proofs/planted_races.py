"""Bugs of order that ``make prove-races`` plants in a copy of csrc: a wait that is left out, memory freed early.

One build has all of them; ``ps_plant(number)`` turns one on. The sources of the core stay as they are.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Edit:
    """A statement of csrc that the bug of this number leaves out, or replaces."""

    number: int
    """0: the statement is replaced in any case."""
    name: str
    file: str
    statement: str
    instead: str = ""

    def apply(self, folder: Path) -> None:
        """Edits the file below ``folder``, a copy of csrc.

        Raises:
            ValueError: the statement is not there exactly once.
        """
        path = folder / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.statement) != 1:
            raise ValueError(
                f"csrc/{self.file} has the statement of the planted bug {self.name!r} {text.count(self.statement)} "
                f"times, not once: {self.statement!r}; name its new place in proofs/planted_races.py"
            )
        if self.number == 0 or "planted(" in self.instead:
            edited = self.instead
        elif self.instead:
            edited = f"if (planted({self.number})) {{ {self.instead} }} else {{ {self.statement} }}"
        else:
            edited = f"if (!planted({self.number})) {{ {self.statement} }}"
        path.write_text(text.replace(self.statement, edited), encoding="utf-8")


MEMORY = "engine/chunk_memory.cpp"
DISK = "engine/disk_states.cpp"
TRIPS = "engine/round_trips.cpp"
STORE = "engine/offload_store.cpp"
UPDATES = "engine/update_jobs.cpp"
BACKEND = "backend/cpu_backend.cpp"

ARENA = "memory/host_arena.cpp"

# A clock that counts its readings: no decision depends on the machine's speed. An update gives its turn away once it is
# past the check of its cancellation. Freed memory is watched (proofs/scheduler/freed_memory.h).
SIMULATION = (
    Edit(
        0,
        "clock",
        "common/tracing.h",
        "using TraceClock = std::chrono::steady_clock;",
        "struct TraceClock {\n"
        "  using duration = std::chrono::nanoseconds;\n"
        "  using rep = duration::rep;\n"
        "  using period = duration::period;\n"
        "  using time_point = std::chrono::time_point<TraceClock>;\n"
        "  static constexpr bool is_steady = true;\n"
        "  static time_point now() noexcept { return time_point(duration(scheduled_nanoseconds())); }\n"
        "};",
    ),
    Edit(0, "running update", UPDATES, "if (!update->is_cancelled()) run(*update, span.get());",
         "if (update->is_cancelled()) return;\n"
         "Scheduler::get().pass();\n"
         "run(*update, span.get());"),
    Edit(0, "freed device memory", BACKEND,
         "std::free(pointer);\n    meter_->subtract_device_buffer(num_bytes);",
         "free_later(pointer, num_bytes);\n    meter_->subtract_device_buffer(num_bytes);"),
    Edit(0, "freed memory of activations", BACKEND,
         "std::free(pointer);\n    lent_activation_bytes_ -= num_bytes;",
         "free_later(pointer, num_bytes);\n    lent_activation_bytes_ -= num_bytes;"),
    Edit(0, "freed host memory", ARENA, "used_bytes_ -= size;\n",
         "used_bytes_ -= size;\n  mark_freed(data, size);\n"),
    Edit(0, "host memory that is used again", ARENA, "const bool zeroed = offset >= region.touched;",
         "const bool zeroed = offset >= region.touched;\n"
         "  check_freed(region.data + offset, std::clamp(region.touched - offset, int64_t{0}, size));"),
    Edit(0, "host memory of an earlier engine", ARENA, "region->touched = kept.num_bytes;",
         "region->touched = kept.num_bytes;\n  mark_freed(kept.data, kept.num_bytes);"),
    Edit(0, "host memory that is unmapped", ARENA,
         "void HostArena::unmap(Region& region) {",
         "void HostArena::unmap(Region& region) {\n"
         "  for (const auto& [offset, size] : region.free) {\n"
         "    check_freed(region.data + offset, std::clamp(region.touched - offset, int64_t{0}, size));\n"
         "  }"),
)  # fmt: skip

BUGS = (
    Edit(1, "an upload does not wait for what makes the array on the host", MEMORY,
         "backend().wait(Queue::kUpload, record.host_ready);"),
    Edit(2, "an upload of states does not wait for their write to the disk", MEMORY,
         "if (record.on_disk) backend().wait(Queue::kUpload, record.host_buffer_busy_until);"),
    Edit(3, "a download does not wait for the array's upload", MEMORY,
         "backend().wait(Queue::kDownload, record.device_ready);"),
    Edit(4, "a download does not wait for readers of the host's memory", MEMORY,
         "backend().wait(Queue::kDownload, event);"),
    Edit(5, "compute does not wait for an upload", MEMORY, "backend().wait(Queue::kCompute, record.device_ready);"),
    Edit(6, "an update does not wait for the array on the host", MEMORY,
         "await(record.host_ready, maker_on_host(id), id);"),
    Edit(7, "host memory is freed while a transfer uses it", MEMORY,
         "backend().settle(std::exchange(*event, nullptr));", "*event = nullptr;"),
    Edit(8, "values are read on the host before they are there", MEMORY, "backend().synchronize(event);"),
    Edit(9, "a device buffer is written before its last transfer", MEMORY,
         "backend().wait(queue, device_buffer.busy.copied);"),
    Edit(10, "a download does not mark the device buffer as busy", MEMORY,
         "record.device_buffer.busy.copied = record.host_ready;"),
    Edit(11, "an upload does not mark the device buffer as busy", MEMORY,
         "record.device_buffer.busy = {record.device_ready, nullptr};"),
    Edit(12, "device memory is freed while a transfer uses it", BACKEND,
         "settle(busy.copied);\n    settle(busy.computed);\n    free_later(pointer, num_bytes);\n"
         "    meter_->subtract_device_buffer(num_bytes);",
         "free_later(pointer, num_bytes); meter_->subtract_device_buffer(num_bytes);"),
    Edit(13, "a host update does not wait for its gradient", UPDATES,
         "for (const Event& event : update.after) backend_.synchronize(event);"),
    Edit(14, "a host update does not wait for its states", UPDATES,
         "for (const Event& event : update.states) backend_.synchronize(event);"),
    Edit(15, "a round trip's update does not wait for the states' upload", TRIPS,
         "backend.wait(Queue::kRoundTripUpdate, backend.record(Queue::kRoundTripUp));"),
    Edit(16, "a round trip's download does not wait for the update", TRIPS,
         "backend.wait(Queue::kRoundTripDown, updated);"),
    Edit(17, "a round trip does not wait for the states on the host", TRIPS,
         "for (const Event& event : round_trip.after) backend.wait(Queue::kRoundTripUp, event);"),
    Edit(18, "a round trip writes its buffer before the last one has left it", TRIPS,
         "memory_.await_device_buffer(Queue::kRoundTripUp, device_buffer);"),
    Edit(19, "a read of the disk does not wait for users of its memory", DISK,
         "for (const Event& event : busy) memory_.backend().settle(event);"),
    Edit(20, "a read of the disk does not wait for the write of the same states", DISK,
         "for (const Event& event : written) memory_.backend().synchronize(event);"),
    Edit(23, "a write to the disk does not wait for the update", DISK,
         "for (const Event& event : after) memory_.backend().synchronize(event);"),
    Edit(24, "an offloaded activation returns before it has left", STORE,
         "backend.wait(Queue::kUpload, offloaded.put);"),
    Edit(25, "compute does not wait for an offloaded activation", STORE,
         "memory().backend().wait(Queue::kCompute, offloaded.fetched);"),
    Edit(26, "an activation's memory is freed before it has left", STORE,
         "memory().backend().synchronize(entry(ticket).put);", "entry(ticket);"),
    Edit(27, "an offloaded activation's host memory is freed early", "engine/speculation.cpp",
         "return backend_.is_over(entry.first);", "return true;"),
    Edit(28, "the pool hands a device buffer out as idle", "memory/device_buffer_pool.cpp",
         "idle_.emplace(num_bytes, Idle{data, busy});", "idle_.emplace(num_bytes, Idle{data, {}});"),
    Edit(29, "a cancelled update is not awaited", "engine/speculation.cpp",
         "if (values.are_in_place()) return take_back(std::move(values));\n  backend_.settle(values.done);",
         "if (values.are_in_place()) return take_back(std::move(values));"),
    Edit(30, "an update is rolled back while it runs", "engine/speculation.cpp",
         "backend_.settle(values.done);\n  HostUpdate back;",
         "if (!planted(30)) backend_.settle(values.done);\n  HostUpdate back;"),
    Edit(31, "a round trip's states are not marked as on their way", "engine/chunk_updates.cpp",
         "state.host_ready = events.down;"),
    Edit(32, "a download's event is lost", MEMORY, "record.host_ready = downloads.record();",
         "downloads.record(); record.host_ready = nullptr;"),
    Edit(33, "an upload's event is lost", MEMORY,
         "record.device_ready = upload_to(id, record.device_buffer.data, record.device_buffer);",
         "upload_to(id, record.device_buffer.data, record.device_buffer); record.device_ready = nullptr;"),
    Edit(34, "a round trip does not mark its buffer as busy", TRIPS,
         "device_buffer.busy = {backend.record(Queue::kRoundTripDown), updated};"),
    Edit(35, "states on a disk count as read at once", DISK, "record.host_ready = ready;",
         "record.host_ready = nullptr;"),
)  # fmt: skip

MASKED = {
    2: "no upload begins before the write is over: states go to the device in another step than they were stored in",
    3: "compute wrote the array before, and it waited for the upload",
    4: "the gradient's host buffer was dropped when the device wrote the gradient, which awaits readers (bug 7)",
    17: "forward waited for the value that the same update made, and each queue goes on in order",
    20: "reads run in order: an earlier one took over the buffer that was written, and waited for the write",
}
"""Edits that change no number, by the wait that covers what they leave out. Counted over all ways of training: the
event was complete each time that the statement was reached."""

# In proofs/scheduler/work_queue.cpp.
QUEUE_BUGS = {21: "a queue runs its newest task first", 22: "an event is complete before its task"}
