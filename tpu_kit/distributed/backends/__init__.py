"""What a replica does on its device, a class for each kind of device.

Offers `native.CpuRuntime`, `native.CudaRuntime`, `xla.TpuRuntime` and `xla.SimulatedRuntime`; `runtime.Runtime` is
their interface. With tpu_kit/xla, the one place for private calls of torch_xla.
Must not know how replicas are started.
"""
