"""Write a page of a run's answers: `python -m tunix.samples RUN [against=RUN] [output=page.html] [key=value]`.

samples.jsonl -> `samples_index` (a row for each group of answers) -> `samples_page` (the chosen groups) -> HTML
"""

import sys

from tunix.base.files import describing_refusal, expand_home, find_writable
from tunix.config import Samples
from tunix.config.command_line import run_local
from tunix.rl.samples_page import Choice, check_comparable, make_page, read_run


def write_samples(command: Samples) -> str:
    """Write the page; return what to print."""
    output = find_writable("output", command.output)
    names = [command.run] if command.against is None else [command.run, command.against]
    runs = [read_run(expand_home(name)) for name in names]
    if len(runs) > 1:
        check_comparable(*runs)
    choice = Choice(command.steps, command.num_steps, command.num_groups, int(command.max_mb * 1e6))
    page, left_out = make_page(runs, choice)
    with describing_refusal(f"output={output}"):
        output.write_bytes(page.encode())  # in place: it may be a device, like /dev/stdout
    return "\n".join([*left_out, f"{output}: {output.stat().st_size / 1e6:.1f} MB; open it in a browser"])


if __name__ == "__main__":
    sys.exit(run_local(Samples, write_samples))
