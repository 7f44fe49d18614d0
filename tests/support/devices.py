"""Fake CPU devices. Imports no jax: it sets what jax reads when it starts."""

from importlib.metadata import version

# Most programs here run a handful of steps: LLVM would take longer than it saves, and the older of the two emitters of
# fused loops needs half the time. A program is compiled as one part: several parts take a tenth longer in all, and which
# loop is in which part changes how the quick compiler rounds, so a change elsewhere in a program would change a digit.
# jax 0.11 has that one no more, and a flag that XLA does not know ends the process.
OLDER_EMITTER = "--xla_cpu_use_fusion_emitters=false " if version("jax").startswith("0.10.") else ""
QUICK = f"--xla_backend_optimization_level=0 {OLDER_EMITTER}--xla_cpu_parallel_codegen_split_count=1"


def xla_flags(num_devices: int, *, optimized: bool = False) -> str:
    """XLA_FLAGS for so many devices, for programs that compile quickly unless `optimized`."""
    devices = f"--xla_force_host_platform_device_count={num_devices}"
    return devices if optimized else f"{devices} {QUICK}"
