"""Reading a GLM-4-MoE checkpoint folder into the fused tensors that `model.py` computes with.

Everything here runs away from the step loop: a weight change reads, checks and fuses in the background, and the loop
only takes a new reference.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agentrl.errors import DataError, UserError


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `config.json` (model_type glm4_moe) that decide the forward pass."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    architectures: list[str] = []
    head_dim: int = 0
    n_shared_experts: int = 1
    first_k_dense_replace: int = 1
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    rms_norm_eps: float = 1e-5
    hidden_act: str = "silu"
    attention_bias: bool = False
    use_qk_norm: bool = False
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 131_072
    rope_parameters: dict[str, Any] = {}
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 0.5

    @property
    def head(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary(self) -> int:
        """How many of a head's dimensions are rotated."""
        return int(self.head * self.rope_parameters.get("partial_rotary_factor", self.partial_rotary_factor))

    @property
    def theta(self) -> float:
        return float(self.rope_parameters.get("rope_theta", self.rope_theta))

    @classmethod
    def read(cls, folder: str) -> ModelConfig:
        """UserError where there is no model in `folder` or one that this engine does not compute."""
        path = Path(folder) / "config.json"
        try:
            config = msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as exc:
            raise UserError(f"{path}: cannot be read ({exc.strerror})", hint="Name a folder with a model.") from exc
        except msgspec.MsgspecError as exc:
            raise UserError(f"{path}: {exc}", hint="The embedded engine computes the glm4_moe layout only.") from exc
        wrong = [
            f"{what} {got!r}"
            for what, got, good in (
                ("model_type", config.model_type, "glm4_moe"),
                ("hidden_act", config.hidden_act, "silu"),
                ("rope_type", config.rope_parameters.get("rope_type", "default"), "default"),
            )
            if got != good
        ]
        if wrong:
            raise UserError(f"{path}: {', '.join(wrong)} is not supported", hint="Use engines.kind = 'sglang'.")
        return config


class Mlp(msgspec.Struct, frozen=True):
    """up: (2 * inner, hidden), all gates first; down: (hidden, inner).

    A MoE layer lays its experts side by side and the shared expert last, so that one product serves all.
    """

    up: Tensor
    down: Tensor


class Router(msgspec.Struct, frozen=True):
    weight: Tensor  # (experts, hidden), float32
    bias: Tensor  # (experts,), float32: decides the choice, not the share


class Layer(msgspec.Struct, frozen=True):
    norm1: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # (heads + kv heads, head)
    out: Tensor
    norm2: Tensor
    mlp: Mlp
    router: Router | None


class Weights(msgspec.Struct, frozen=True):
    """One version, immutable. checksums: sha256 of every tensor as stored, by its checkpoint name."""

    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor
    checksums: dict[str, str]

    @property
    def checksum(self) -> str:
        joined = "\n".join(f"{name} {digest}" for name, digest in sorted(self.checksums.items()))
        return hashlib.sha256(joined.encode()).hexdigest()


def read(folder: str, config: ModelConfig, dtype: torch.dtype) -> Weights:
    """Weights of `folder`, which must have the layout of `config`. DataError names the file and what is wrong."""
    found = ModelConfig.read(folder)
    if found != config:
        changed = [f for f in ModelConfig.__struct_fields__ if getattr(found, f) != getattr(config, f)]
        raise DataError(f"{folder}/config.json: {', '.join(changed)} differ from the model that is running")
    return _Reader(folder, config, dtype).weights()


class _Reader:
    def __init__(self, folder: str, config: ModelConfig, dtype: torch.dtype) -> None:
        self.folder, self.config, self.dtype = folder, config, dtype
        self.tensors: dict[str, Tensor] = {}
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise DataError(f"{folder}: no *.safetensors file", hint="Was the version published completely?")
        for file in files:
            try:
                with safe_open(file, "pt") as handle:
                    self.tensors.update({name: handle.get_tensor(name) for name in handle.keys()})  # noqa: SIM118
            except (SafetensorError, OSError) as exc:
                raise DataError(f"{file}: {exc}", hint="The file is damaged; publish this version again.") from exc
        self.checksums = {
            name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, tensor in self.tensors.items()
        }

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise DataError(f"{self.folder}: tensor {name} is missing")
        if tensor.shape != shape:
            raise DataError(f"{self.folder}: {name} has shape {tuple(tensor.shape)}, expected {shape}")
        return tensor.to(self.dtype)

    def weights(self) -> Weights:
        c = self.config
        embed = self.take("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        return Weights(
            embed=embed,
            layers=tuple(self.layer(f"model.layers.{i}", i) for i in range(c.num_hidden_layers)),
            norm=self.take("model.norm.weight", c.hidden_size),
            head=embed if c.tie_word_embeddings else self.take("lm_head.weight", c.vocab_size, c.hidden_size),
            checksums=self.checksums,
        )

    def layer(self, name: str, index: int) -> Layer:
        c, attn = self.config, f"{name}.self_attn"
        sizes = {
            "q": c.num_attention_heads * c.head,
            "k": c.num_key_value_heads * c.head,
            "v": c.num_key_value_heads * c.head,
        }
        bias = qk_norm = None
        if c.attention_bias:
            bias = torch.cat([self.take(f"{attn}.{p}_proj.bias", size) for p, size in sizes.items()])
        if c.use_qk_norm:
            heads = {"q": c.num_attention_heads, "k": c.num_key_value_heads}
            qk_norm = torch.cat(
                [self.take(f"{attn}.{p}_norm.weight", c.head).expand(n, c.head) for p, n in heads.items()]
            )
        moe = index >= c.first_k_dense_replace
        return Layer(
            norm1=self.take(f"{name}.input_layernorm.weight", c.hidden_size),
            qkv=torch.cat([self.take(f"{attn}.{p}_proj.weight", size, c.hidden_size) for p, size in sizes.items()]),
            qkv_bias=bias,
            qk_norm=qk_norm,
            out=self.take(f"{attn}.o_proj.weight", c.hidden_size, sizes["q"]),
            norm2=self.take(f"{name}.post_attention_layernorm.weight", c.hidden_size),
            mlp=self.experts(f"{name}.mlp") if moe else self.side_by_side([(f"{name}.mlp", c.intermediate_size)]),
            router=self.router(f"{name}.mlp.gate") if moe else None,
        )

    def router(self, name: str) -> Router:
        c = self.config
        return Router(
            weight=self.take(f"{name}.weight", c.n_routed_experts, c.hidden_size).float(),
            bias=self.take(f"{name}.e_score_correction_bias", c.n_routed_experts).float(),
        )

    def experts(self, name: str) -> Mlp:
        c = self.config
        parts = [(f"{name}.experts.{e}", c.moe_intermediate_size) for e in range(c.n_routed_experts)]
        return self.side_by_side([*parts, (f"{name}.shared_experts", c.moe_intermediate_size * c.n_shared_experts)])

    def side_by_side(self, parts: list[tuple[str, int]]) -> Mlp:
        hidden = self.config.hidden_size
        gates = [self.take(f"{name}.gate_proj.weight", inner, hidden) for name, inner in parts]
        ups = [self.take(f"{name}.up_proj.weight", inner, hidden) for name, inner in parts]
        downs = [self.take(f"{name}.down_proj.weight", hidden, inner) for name, inner in parts]
        return Mlp(up=torch.cat(gates + ups), down=torch.cat(downs, dim=1))
