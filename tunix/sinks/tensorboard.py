"""TensorBoard events, in the run's folder: `tensorboard --logdir outputs/`."""

import time
from typing import Any

from tunix.sinks.sink import Start


class TensorBoard:
    """Numbers as scalars GROUP/NAME, texts as they are, pictures."""

    def __init__(self, start: Start):
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # takes a while to import

        self.events = EventFileWriter(str(start.folder))

    def write(self, record: dict[str, Any], group: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [(k, v) for k, v in record.items() if k != "step" and isinstance(v, int | float)]
        self._add(record["step"], [Summary.Value(tag=f"{group}/{name}", simple_value=value) for name, value in scalars])

    def text(self, name: str, text: str, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text import metadata
        from tensorboard.util import tensor_util

        # TensorBoard reads texts as Markdown, in which four spaces before each line mean: show it as it is.
        tensor = tensor_util.make_tensor_proto("    " + text.replace("\n", "\n    "))
        self._add(step, [Summary.Value(tag=name, metadata=metadata.create_summary_metadata(name, ""), tensor=tensor)])

    def image(self, name: str, png: bytes, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # A PNG begins with 8 bytes of its own and 8 of the head of its first chunk, IHDR; then width and height.
        width, height = (int.from_bytes(png[start : start + 4], "big") for start in (16, 20))
        image = Summary.Image(width=width, height=height, encoded_image_string=png)
        self._add(step, [Summary.Value(tag=name, image=image)])

    def close(self, error: BaseException | None) -> None:
        self.events.close()

    def _add(self, step: int, values: list[Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self.events.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=values)))
