"""Compile steps for H200s that are not there: `python compile_memory.py NAME ...`, with names of test_derived_memory.py.

Prints a line of JSON for each name: the bytes of a device that the compiled step needs.
"""

import json
import sys

from costs.test_derived_memory import read_case

from tunix.plan.compile import compile_for, describe_devices


def main(names: list[str]) -> None:
    for name in names:
        cfg, cluster = read_case(name)
        compiled, _ = compile_for(cfg, cluster, describe_devices(cluster, cfg.plan.memory_share), timed=False)
        print(json.dumps({name: compiled.memory}))


if __name__ == "__main__":
    main(sys.argv[1:])
