"""Modules for which functions of their packages are swapped, or that fuse as they are."""

from __future__ import annotations

from torch import Tensor, nn

from tests.support.third_party.registry import (
    WIDTH,
    First,
    Projected,
    Single,
    empty_modules,
    heads,
    module,
)


@module("performer-pytorch", "performer_pytorch", causal=False)
def performer_causal() -> nn.Module:
    from performer_pytorch import SelfAttention

    return First(SelfAttention(dim=WIDTH, heads=2, dim_head=8, causal=True, nb_features=16))


@module("performer-pytorch", "performer_pytorch", causal=False)
def performer() -> nn.Module:
    from performer_pytorch import SelfAttention

    return First(SelfAttention(dim=WIDTH, heads=2, dim_head=8, nb_features=16))


@module("linear-attention-transformer", "linear_attention_transformer")
def linear_attention_causal() -> nn.Module:
    from linear_attention_transformer.linear_attention_transformer import SelfAttention

    return SelfAttention(WIDTH, 2, causal=True, blindspot_size=1)


@module("linear-attention-transformer", "linear_attention_transformer", unit=4)
def linear_attention_blindspot() -> nn.Module:
    from linear_attention_transformer.linear_attention_transformer import SelfAttention

    return SelfAttention(WIDTH, 2, causal=True, blindspot_size=4)


@module("minGRU-pytorch", "minGRU_pytorch")
def min_gru_layer() -> nn.Module:
    from minGRU_pytorch import minGRU

    return minGRU(WIDTH)


@module("minGRU-pytorch", "minGRU_pytorch")
def min_lstm_layer() -> nn.Module:
    from minGRU_pytorch.minLSTM import minLSTM

    return minLSTM(WIDTH)


@module("mambapy", "mambapy")
def mambapy_parallel() -> nn.Module:
    from mambapy.mamba import MambaBlock, MambaConfig

    return MambaBlock(MambaConfig(d_model=WIDTH, n_layers=1, d_state=4, use_cuda=False))


@module("mambapy", "mambapy")
def mambapy_sequential() -> nn.Module:
    from mambapy.mamba import MambaBlock, MambaConfig

    config = MambaConfig(d_model=WIDTH, n_layers=1, d_state=4, use_cuda=False, pscan=False)
    return MambaBlock(config)


@module("torchscale", "torchscale")
def torchscale_retention() -> nn.Module:
    # The package imports torchvision, and timm, for its models of images.
    with empty_modules("torchvision", "timm", "timm.models", "timm.models.layers") as layers:
        vars(layers)["drop_path"] = None
        from torchscale.architecture.config import RetNetConfig
        from torchscale.architecture.retnet import RetNetRelPos
        from torchscale.component.multiscale_retention import MultiScaleRetention

    config = RetNetConfig(
        decoder_embed_dim=WIDTH, decoder_value_embed_dim=32, decoder_retention_heads=2
    )

    class Retention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.retention = MultiScaleRetention(config, WIDTH, 32, 2)
            self.positions = RetNetRelPos(config)

        def forward(self, x: Tensor) -> Tensor:
            return self.retention(x, self.positions(x.shape[1]))

    return Retention()


@module("xlstm", "xlstm")
def xlstm_parallel() -> nn.Module:
    from xlstm.blocks.mlstm.backends import parallel_stabilized_simple

    def cell(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
        q, k, v, i, f = map(heads, (q, k, v, i, f))
        return parallel_stabilized_simple(q, k, v, i, f).transpose(1, 2).flatten(2)

    return Projected(cell, 16, 16, 16, 2, 2)


@module("xlstm", "xlstm")
def xlstm_layer() -> nn.Module:
    from xlstm.blocks.mlstm.layer import mLSTMLayer, mLSTMLayerConfig

    return mLSTMLayer(mLSTMLayerConfig(embedding_dim=WIDTH, context_length=1024, num_heads=2))


@module("xlstm", "xlstm", unit=16)
def xlstm_chunkwise() -> nn.Module:
    from xlstm.blocks.mlstm.backends import chunkwise_simple

    def cell(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
        q, k, v, i, f = (heads(x).contiguous() for x in (q, k, v, i, f))
        found = chunkwise_simple(q, k, v, i[..., 0], f[..., 0], chunk_size=16)
        return found.transpose(1, 2).flatten(2)

    return Projected(cell, 16, 16, 16, 2, 2)


@module("xlstm", "xlstm")
def xlstm_large_block() -> nn.Module:
    from xlstm.xlstm_large.model import mLSTMBlock, xLSTMLargeConfig

    config = xLSTMLargeConfig(
        embedding_dim=WIDTH,
        num_heads=2,
        num_blocks=1,
        vocab_size=8,
        chunkwise_kernel="chunkwise--native_autograd",
        sequence_kernel="native_sequence__native",
        step_kernel="native",
        mode="inference",
    )
    return First(mLSTMBlock(config))


@module("mlstm_kernels", "mlstm_kernels")
def mlstm_backend() -> nn.Module:
    from mlstm_kernels.torch.backend_module import mLSTMBackend, mLSTMBackendConfig

    backend = mLSTMBackend(mLSTMBackendConfig(mode="inference", chunk_size=16))

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.backend = nn.Linear(WIDTH, 52), backend

        def forward(self, x: Tensor) -> Tensor:
            q, k, v, i, f = map(heads, self.project(x).split([16, 16, 16, 2, 2], -1))
            h, _ = self.backend(q, k, v, i[..., 0], f[..., 0])
            return h.transpose(1, 2).flatten(2)

    return Cell()


@module("mlstm_kernels", "mlstm_kernels")
def mlstm_parallel() -> nn.Module:
    from mlstm_kernels.torch.parallel.native import mlstm_parallel__native_autograd

    def cell(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
        q, k, v, i, f = map(heads, (q, k, v, i, f))
        found = mlstm_parallel__native_autograd(q, k, v, i[..., 0], f[..., 0])
        return found.transpose(1, 2).flatten(2)

    return Projected(cell, 16, 16, 16, 2, 2)


@module("accelerated-scan", "accelerated_scan")
def accelerated_scan() -> nn.Module:
    from accelerated_scan import ref

    def recurrence(a: Tensor, b: Tensor) -> Tensor:
        a, b = (x.transpose(1, 2).contiguous() for x in (a.sigmoid(), b))
        return ref.scan(a, b).transpose(1, 2)

    return Projected(recurrence, 16, 16)


@module("gateloop-transformer", "gateloop_transformer")
def gate_loop() -> nn.Module:
    from gateloop_transformer import SimpleGateLoopLayer

    return SimpleGateLoopLayer(WIDTH)


@module("gateloop-transformer", "gateloop_transformer")
def gate_loop_in_log_space() -> nn.Module:
    from gateloop_transformer import SimpleGateLoopLayer

    return SimpleGateLoopLayer(WIDTH, use_heinsen=True)


@module("gateloop-transformer", "gateloop_transformer")
def gate_looped_attention() -> nn.Module:
    from gateloop_transformer.gateloop_transformer import GateLoopedAttention

    return GateLoopedAttention(WIDTH, heads=2, checkpoint_gate_looped_attn=False)


@module("gated-state-spaces-pytorch", "gated_state_spaces_pytorch")
def diagonal_state_space() -> nn.Module:
    from gated_state_spaces_pytorch.gss import DSS

    return DSS(dim=WIDTH, kernel_N=8)


@module("Mega-pytorch", "mega_pytorch")
def moving_averages() -> nn.Module:
    from mega_pytorch.mega_pytorch import MultiHeadedEMA

    return MultiHeadedEMA(dim=WIDTH, heads=4)


@module("LRU-pytorch", "LRU_pytorch")
def linear_recurrent_unit() -> nn.Module:
    from LRU_pytorch import LRU

    return Single(LRU(in_features=WIDTH, out_features=WIDTH, state_features=8))


@module("minimamba", "minimamba")
def minimamba_layer() -> nn.Module:
    from minimamba.config import BaseMambaConfig
    from minimamba.s6 import S6

    return S6(BaseMambaConfig(d_model=WIDTH, n_layer=1, d_state=4))


@module("mingru-scans", "mingru")
def mingru_scans() -> nn.Module:
    from mingru import MinGRU

    return MinGRU(WIDTH, WIDTH)


@module("mingru-scans", "mingru")
def signed_mingru() -> nn.Module:
    from mingru import SignedMinGRU

    return SignedMinGRU(WIDTH, WIDTH)


@module("mingru-scans", "mingru")
def rotation_mingru() -> nn.Module:
    from mingru import RotationMinGRU

    return RotationMinGRU(WIDTH, WIDTH)


@module("mingru-scans", "mingru")
def delta_mingru() -> nn.Module:
    from mingru import DeltaMinGRU

    return DeltaMinGRU(WIDTH, WIDTH)


@module("taylor-series-linear-attention", "taylor_series_linear_attention", causal=False)
def taylor_series() -> nn.Module:
    from taylor_series_linear_attention import TaylorSeriesLinearAttn

    return TaylorSeriesLinearAttn(WIDTH, dim_head=8, heads=2)


@module("s5-pytorch", "s5")
def simplified_state_space() -> nn.Module:
    from s5 import S5

    return Single(S5(WIDTH, 8))


@module("aft-pytorch", "aft_pytorch", causal=False)
def attention_free() -> nn.Module:
    from aft_pytorch.aft_pytorch import AFTSimple

    return AFTSimple(max_seqlen=1024, dim=WIDTH, hidden_dim=WIDTH)


@module("yet-another-retnet", "yet_another_retnet")
def another_retention() -> nn.Module:
    from yet_another_retnet.retention import MultiScaleRetention

    return nn.Sequential(nn.Linear(WIDTH, 32), First(MultiScaleRetention(32, 4), 3))


@module("assoc-scan", "assoc_scan")
def associative_scan() -> nn.Module:
    from assoc_scan import AssocScan

    scan = AssocScan()
    return Projected(lambda a, b: scan(a.sigmoid(), b), 16, 16)


@module("opengdn", "opengdn")
def gated_delta_by_tokens() -> nn.Module:
    from opengdn.mixer import GatedDeltaMixer

    return GatedDeltaMixer(WIDTH, 2, backend="reference")


@module("opengdn", "opengdn")
def gated_delta_by_chunks() -> nn.Module:
    from opengdn.mixer import GatedDeltaMixer

    return GatedDeltaMixer(WIDTH, 2, backend="chunkwise", chunk_size=16)


@module("trim-transformer", "trim_transformer", causal=False)
def trimmed_attention() -> nn.Module:
    from trim_transformer.modules import TrimMultiheadAttention

    return First(TrimMultiheadAttention(WIDTH, 2, batch_first=True), 3)


@module("trim-transformer", "trim_transformer", causal=False)
def trimmed_causal_attention() -> nn.Module:
    # Scores are divided by the number of all tokens, so that an output changes with later ones.
    from trim_transformer.modules import TrimMultiheadAttention

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = TrimMultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            found = self.attention(x, x, x, is_causal=True)
            return found if isinstance(found, Tensor) else found[0]

    return Causal()


@module("agent-attention-pytorch", "agent_attention_pytorch", linear=False, causal=False)
def agent_attention() -> nn.Module:
    from agent_attention_pytorch import AgentSelfAttention

    return AgentSelfAttention(WIDTH, num_agent_tokens=4, dim_head=8, heads=2)
