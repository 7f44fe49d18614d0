"""Fake CPU devices. Imports no jax: it sets what jax reads when it starts."""

# Most programs here run a handful of steps: LLVM would take longer than it saves, and the older of the two emitters of
# fused loops needs half the time. A program is compiled as one part: several parts take a tenth longer in all, and which
# loop is in which part changes how the quick compiler rounds, so a change elsewhere in a program would change a digit.
QUICK = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)


def xla_flags(num_devices: int, *, optimized: bool = False) -> str:
    """XLA_FLAGS for so many devices, for programs that compile quickly unless `optimized`."""
    devices = f"--xla_force_host_platform_device_count={num_devices}"
    return devices if optimized else f"{devices} {QUICK}"
