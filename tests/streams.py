"""CUDA streams that a test plays on the CPU."""

from __future__ import annotations

import contextlib

import torch

from sparsemla import HotRows, host_context, hot_rows


class Streams:
    """CUDA streams in the mind: what is put on the one beside runs when the other waits for it.

    So it runs as late as it can, while on a CPU it runs as early as it can.
    """

    def __init__(self, monkeypatch):
        streams = self
        self.queue, self.beside, self.forks, self.num_late, self.joined = [], False, 0, 0, 0

        class Stream:
            def __init__(self, device=None):
                pass

            def wait_event(self, event):
                if self is streams.main:
                    assert event.on is not streams.main
                    streams.joined += 1
                    while event in streams.queue:
                        streams.run(streams.queue.pop(0))
                else:
                    assert event.on is streams.main
                    streams.forks += 1

            def wait_stream(self, other):
                event = Event()
                event.record(other)
                self.wait_event(event)

        class Event:
            def record(self, stream):
                self.on = stream
                if stream is not streams.main:
                    streams.queue.append(self)

        @contextlib.contextmanager
        def stream(which):
            streams.beside, streams.forks = True, streams.forks - 1
            assert streams.forks == 0, "the stream must wait for the step's"
            yield
            streams.beside = False

        self.main = Stream()
        for name, value in (
            ("Stream", Stream),
            ("Event", Event),
            ("stream", stream),
            ("current_stream", lambda device: self.main),
        ):
            monkeypatch.setattr(torch.cuda, name, value)
        for owner, name in (
            (HotRows, "_lead"),
            (HotRows, "_fetch_ahead"),
            (hot_rows, "fetch_rows"),
            (host_context, "fetch_rows"),
            (host_context, "gather_dequant"),
        ):
            monkeypatch.setattr(owner, name, self.late(getattr(owner, name)))
        self.side = Stream()

    def run(self, call):
        if callable(call):
            self.num_late += 1
            call()

    def late(self, function):
        def call(*args, **options):
            if self.beside:
                self.queue.append(lambda: function(*args, **options))
            else:
                function(*args, **options)

        return call
