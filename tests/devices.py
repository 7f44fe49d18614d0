"""Fake CPU devices. Imports no jax: it sets what jax reads when it starts."""


def xla_flags(num_devices: int, *, optimized: bool = False) -> str:
    """XLA_FLAGS for so many devices. Most programs here run a handful of steps: LLVM would take longer than it saves."""
    devices = f"--xla_force_host_platform_device_count={num_devices}"
    return devices if optimized else f"{devices} --xla_backend_optimization_level=0"
