"""Every number the engine model starts from, with its unit and its source. Nothing here is fitted to a result.

"public": printed in a model card, a data sheet or a report. "derived": arithmetic on public numbers. "assumed": our own
judgement, to be measured on real machines; whoever fits one of them to a published figure says so.
"""

from __future__ import annotations

from agentrl.records import Record


class ModelSpec(Record):
    """A sparse-attention mixture of experts. Parameters are counts, lengths are tokens."""

    layers: int
    dense_layers: int  # the first ones, without experts
    hidden: int
    experts: int  # routed, per layer
    top_k: int  # routed experts of one token
    shared_experts: int
    expert_params: int  # of one expert in one layer
    attention_params: int  # of one layer, indexer included
    dense_params: int  # of one dense layer's feed-forward
    embedding_params: int  # embedding and output head
    heads: int
    latent: int  # KV latent and rotary part, values per token and layer
    value_latent: int  # the part of it that is read as values
    index_topk: int  # tokens a query attends to
    index_heads: int
    index_dim: int
    index_every: int  # layers that share one indexer

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    @property
    def routed_params(self) -> int:
        return self.moe_layers * self.experts * self.expert_params

    @property
    def resident_params(self) -> int:
        """All but routed experts and attention: read by every step whatever the batch."""
        shared = self.moe_layers * self.shared_experts * self.expert_params
        return shared + self.dense_layers * self.dense_params + self.embedding_params

    @property
    def total_params(self) -> int:
        return self.routed_params + self.resident_params + self.layers * self.attention_params


_HIDDEN = 6144  # public: zai-org/GLM-5 config.json, hidden_size
_ATTENTION = (
    _HIDDEN * 2048  # public: q_lora_rank 2048
    + 2048 * 64 * (192 + 64)  # public: 64 heads, qk_nope_head_dim 192, qk_rope_head_dim 64
    + _HIDDEN * (512 + 64)  # public: kv_lora_rank 512
    + 512 * 64 * (192 + 256)  # public: v_head_dim 256
    + 64 * 256 * _HIDDEN  # output projection
    + 2048 * 32 * 128  # public: index_n_heads 32, index_head_dim 128
    + _HIDDEN * (128 + 32)
)

GLM_5_2 = ModelSpec(
    layers=78,  # public: config.json num_hidden_layers
    dense_layers=3,  # public: first_k_dense_replace
    hidden=_HIDDEN,
    experts=256,  # public: n_routed_experts
    top_k=8,  # public: num_experts_per_tok
    shared_experts=1,  # public: n_shared_experts
    expert_params=3 * _HIDDEN * 2048,  # derived: gate, up, down; public: moe_intermediate_size 2048
    attention_params=_ATTENTION,
    dense_params=3 * _HIDDEN * 12288,  # derived; public: intermediate_size 12288
    embedding_params=2 * 154_880 * _HIDDEN,  # derived; public: vocab_size 154880, untied
    heads=64,  # public
    latent=512 + 64,  # public: kv_lora_rank + qk_rope_head_dim
    value_latent=512,
    index_topk=2048,  # public: index_topk
    index_heads=32,  # public: index_n_heads
    index_dim=128,  # public: index_head_dim
    index_every=4,  # public: GLM-5.2 release post, IndexShare: one indexer for every four layers
)
"""744 billion parameters, 40 billion of them active (public: GLM-5 report, arXiv 2602.15763); a test checks both."""

INDEX_BYTES_PER_KEY = 132.0  # derived: 128 FP8 values and one FP32 scale (public: DeepSeek-V3.2 indexer cache)


class Gpu(Record):
    """Per GPU. Bandwidths in bytes/s, one direction; FLOPs are dense."""

    hbm_bytes: float
    hbm_bytes_s: float
    fp8_flops: float
    bf16_flops: float
    nvlink_bytes_s: float
    host_bytes_s: float


B300 = Gpu(
    hbm_bytes=288e9,  # public: NVIDIA HGX B300, 288 GB HBM3e
    hbm_bytes_s=8e12,  # public: up to 8 TB/s
    fp8_flops=4.5e15,  # public: HGX B300, 36 PFLOP/s dense FP8 for 8 GPUs
    bf16_flops=2.25e15,  # public: HGX B300, 18 PFLOP/s dense BF16 for 8 GPUs
    nvlink_bytes_s=0.9e12,  # public: NVLink 5, 1.8 TB/s both directions
    host_bytes_s=50e9,  # assumed: PCIe Gen5 x16, 64 GB/s on paper, for reads of staged weights and cache offload
)


class Efficiency(Record):
    """Shares of the paper figures that real kernels reach, and what a step costs beside them. All assumed."""

    hbm: float = 0.75  # assumed: large GEMV and attention reads reach 70 to 80 % of HBM bandwidth
    flops: float = 0.45  # assumed: grouped GEMM and MLA kernels at serving sizes
    nvlink: float = 0.60  # assumed: collectives of a few MB
    memory: float = 0.85  # share of HBM for weights and KV (public: SGLang cookbook, --mem-fraction-static 0.85)
    step_s: float = 5e-3  # assumed: launch, sampling and scheduler work of one step that overlaps with nothing
    sequence_s: float = 20e-6  # assumed: scheduler work per running request of the busiest rank, logprobs included
    draft_s: float = 0.3e-3  # assumed: fixed cost of one draft pass
    all_reduce_s: float = 10e-6  # assumed: latency of one all-reduce over 8 GPUs, two a layer under TP
    all_to_all_s: float = 20e-6  # assumed: latency of one dispatch or combine over 8 GPUs
    expert_skew: float = 1.15  # assumed: busiest GPU over the mean under expert parallelism
    accept: float = 0.72  # assumed: chance that a drafted token is accepted, given those before it (public drafter
    #                       measurements for GLM-5.2: first position 0.71; 0.72 gives 2.6 tokens a step for 3 drafts)
    offload_s: float = 0.5e-3  # assumed: bookkeeping of a host cache tier per step; its copies are counted apart
    derate: float = 1.0  # on a whole step: what the roofline leaves out. 1.0: nothing fitted
    headroom: float = 512.0  # assumed: tokens per running request kept free when another is admitted


CHUNK_TOKENS = 8192  # tokens of one prefill chunk of one TP8 engine (public: SGLang cookbook, 8192 to 32768)
CHUNK_TOKENS_DP = 4096  # of one of 8 attention ranks: 32768 / 8 (public: SGLang divides --chunked-prefill-size by dp)
SLOTS_TP = 512  # assumed: --max-running-requests of one TP8 engine, high enough not to bind before KV does
SLOTS_DP = 128  # assumed: of one of 8 ranks (public cookbook values go from 256 to 1,024 a node)

STAGE_BYTES_S = 10e9  # assumed: per node, object store or NVMe to host memory: 744 GB in 74 s
SWAP_FIXED_S = 2.0  # assumed: pausing, re-registering and checking weights, besides copying them from host memory
