"""An SGLang plugin (entry point in the dist-info beside it): two things that 0.5.23 lacks on a CPU without AMX."""


def register():
    import torch
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.pool_host import common

    def plain(dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None):
        return torch.empty(dims, dtype=dtype, device=device)

    common.ALLOC_MEMORY_FUNCS["cpu"] = plain  # host buffers of returned routed experts

    if not hasattr(TorchNativeAttnBackend, "get_cpu_graph_seq_len_fill_value"):  # asked for under attention DP
        TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1
