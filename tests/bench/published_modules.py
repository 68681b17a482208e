"""Modules of other packages as they are published, at small sizes: what the sharding compiler is tried on.

Each is made in float64 with arguments, in evaluation unless it is trained without random numbers. Packages are no
dependencies of the project: a module whose package is not installed is left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

F64 = torch.float64
Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
_TEXT = {"vocab_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_TWO = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
_BOTH = {**_TWO, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
_PATCHES = {"image_size": 16, "patch_size": 4}


class _Of(nn.Module):
    """A module whose result is one tensor of what another returns."""

    def __init__(self, module: nn.Module, take: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.module, self.take = module, take

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.take(self.module(*args, **kwargs))


def ids(rows: int = 4, length: int = 8, values: int = 48) -> torch.Tensor:
    return torch.randint(3, values, (rows, length))


def images(rows: int = 4, channels: int = 3, side: int = 16) -> torch.Tensor:
    return torch.randn(rows, channels, side, side, dtype=F64)


def _hf(
    name: str, config: str, *args: Any, inputs: dict[str, Any] | None = None, take: Any = None, **more: Any
) -> Made:
    """A model of transformers: class, class of its configuration, arguments, and what differs from its defaults."""
    _know_torchvision()
    import transformers

    made = getattr(transformers, config)(**more)
    made.use_cache = False
    model = getattr(transformers, name)(made)
    _with_values(model)
    return _Of(model.double().eval(), take or (lambda out: out[0])), args, dict(inputs or {})


def _with_values(model: nn.Module) -> None:
    """Give values to parameters that are made without any, and small ones to all that are zero."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and not (parameter.isfinite().all() and parameter.abs().sum() > 0):
            nn.init.normal_(parameter, std=0.05)


def _of(
    path: str, *arguments: Any, args: tuple[Any, ...] = (), take: Any = None, train: bool = False, **more: Any
) -> Made:
    """A class or function of a package, called with `arguments`, and the module's own `args`."""
    _know_torchvision()
    folder, _, name = path.rpartition(".")
    module = getattr(importlib.import_module(folder), name)(*arguments, **more)
    _with_values(module)
    module = module.double().train(train)
    return (module if take is None else _Of(module, take)), args, {}


def _vision(name: str, side: int = 32, train: bool = False, **more: Any) -> Made:
    _know_torchvision()
    return _of(
        f"torchvision.models.{name}", args=(images(4, 3, side),), weights=None, train=train, num_classes=8, **more
    )


def _timm(name: str, side: int = 32, **more: Any) -> Made:
    _know_torchvision()
    import timm

    model = timm.create_model(name, num_classes=8, **more)
    _with_values(model)
    return model.double().eval(), (images(4, 3, side),), {}


def _know_torchvision() -> None:
    """Declare the operators that torchvision names when it is imported: its binary is of another torch."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        _LIBRARIES.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            _LIBRARIES[-1].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_LIBRARIES: list[Any] = []
_TWO_TEXTS = {"decoder_input_ids": None}


def _vit(name: str, **more: Any) -> Made:
    return _hf(f"{name}Model", f"{name}Config", images(), **{**_WIDE, **_PATCHES, **more})


def _decoder(name: str, **more: Any) -> Made:
    return _hf(f"{name}ForCausalLM", f"{name}Config", ids(), **{**_TEXT, **_WIDE, **more})


def _encoder(name: str, **more: Any) -> Made:
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[1, 5:] = 0
    return _hf(f"{name}Model", f"{name}Config", ids(), inputs={"attention_mask": mask}, **{**_TEXT, **_WIDE, **more})


def _translator(name: str, **more: Any) -> Made:
    return _hf(f"{name}Model", f"{name}Config", ids(), inputs={"decoder_input_ids": ids(4, 6)}, **{**_TEXT, **more})


def _in_float32(made: Made) -> Made:
    """A module whose kernels have no float64."""
    return made[0].float(), made[1], made[2]


def _losses(name: str, **more: Any) -> Made:
    words = ids()
    return _hf(
        f"{name}ForCausalLM",
        f"{name}Config",
        words,
        inputs={"labels": words.clone()},
        take=lambda out: out.loss,
        **{**_TEXT, **_WIDE, **more},
    )


_GROUPED = {"num_key_value_heads": 2}
_EXPERTS = {"num_key_value_heads": 2, "num_experts_per_tok": 2}
_SOUND = {"conv_dim": (8, 8), "conv_kernel": (4, 4), "conv_stride": (4, 4), "num_feat_extract_layers": 2}
_SOUNDS = {
    **_WIDE,
    **_SOUND,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
}
_ROWS = lambda *shape: torch.randn(*shape, dtype=F64)  # noqa: E731 - a short name for rows of a table
_HEADS = {"num_attention_heads": 4, "attention_head_dim": 8}
_BLOCKS = {"block_out_channels": (8, 16), "norm_num_groups": 4}


def _diffused(name: str, *args: Any, **more: Any) -> Made:
    return _of(f"diffusers.{name}", args=args, take=lambda out: out[0], **more)


def _config(path: str, **more: Any) -> Any:
    folder, _, name = path.rpartition(".")
    return getattr(importlib.import_module(folder), name)(**more)


def _recommender(name: str) -> Made:
    """A model of torch-rechub, that takes a dict of columns."""
    features = importlib.import_module("torch_rechub.basic.features")
    models = importlib.import_module("torch_rechub.models.ranking")
    dense = [features.DenseFeature(f"d{n}") for n in range(3)]
    sparse = [features.SparseFeature(f"s{n}", vocab_size=12, embed_dim=8) for n in range(4)]
    mlp = {"dims": [16, 8], "dropout": 0.0}
    made = {
        "DeepFM": lambda: models.DeepFM(dense + sparse, sparse, mlp),
        "WideDeep": lambda: models.WideDeep(dense, sparse, mlp),
        "DCN": lambda: models.DCN(dense + sparse, 2, mlp),
        "AutoInt": lambda: models.AutoInt(sparse, dense, num_layers=1, num_heads=2),
        "FiBiNet": lambda: models.FiBiNet(sparse, mlp),
    }[name]()
    columns = {f"s{n}": torch.randint(0, 12, (8,)) for n in range(4)}
    columns |= {f"d{n}": torch.randn(8) for n in range(3)} if name != "FiBiNet" else {}
    return made.eval(), (columns,), {}  # its columns are cast to float32


def _spectral() -> Made:
    """A Fourier neural operator. Its weights are complex: `double()` leaves those as they are."""
    module, (x,), _ = _of("neuralop.models.FNO", (8, 8), 1, 1, 8, n_layers=2, args=(_ROWS(4, 1, 16, 16),))
    return module.float(), (x.float(),), {}


def _flow() -> Made:
    """A normalizing flow: the logarithm of densities, through coupling layers."""
    transforms = importlib.import_module("nflows.transforms")
    nets = importlib.import_module("nflows.nn.nets")
    mask = torch.tensor([1, -1, 1, -1])
    layer = transforms.AffineCouplingTransform(mask, lambda i, o: nets.ResidualNet(i, o, hidden_features=16))
    return _Of(layer.double().eval(), lambda out: out[0]), (_ROWS(8, 4),), {}


MODULES: dict[str, Callable[[], Made]] = {
    # text
    "transformers GPT2LMHeadModel": lambda: _hf(
        "GPT2LMHeadModel", "GPT2Config", ids(), n_embd=32, n_layer=2, n_head=4, n_positions=16, **_TEXT
    ),
    "transformers GPTNeoXForCausalLM": lambda: _decoder("GPTNeoX"),
    "transformers FalconForCausalLM": lambda: _decoder("Falcon"),
    "transformers LlamaForCausalLM with its loss": lambda: _losses("Llama", **_GROUPED),
    "transformers MistralForCausalLM": lambda: _decoder("Mistral", sliding_window=4, **_GROUPED),
    "transformers Qwen3ForCausalLM": lambda: _decoder("Qwen3", head_dim=8, **_GROUPED),
    "transformers Gemma2ForCausalLM": lambda: _decoder("Gemma2", head_dim=8, sliding_window=4, **_GROUPED),
    "transformers PhiForCausalLM": lambda: _decoder("Phi"),
    "transformers OPTForCausalLM": lambda: _decoder("OPT", ffn_dim=64, word_embed_proj_dim=32),
    "transformers BloomForCausalLM": lambda: _decoder("Bloom", n_head=4, n_layer=2),
    "transformers GPTJForCausalLM": lambda: _hf(
        "GPTJForCausalLM", "GPTJConfig", ids(), n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=16, **_TEXT
    ),
    "transformers MixtralForCausalLM": lambda: _in_float32(_decoder("Mixtral", num_local_experts=4, **_EXPERTS)),
    "transformers OlmoeForCausalLM": lambda: _in_float32(_decoder("Olmoe", num_experts=4, **_EXPERTS)),
    "transformers MambaForCausalLM": lambda: _hf(
        "MambaForCausalLM", "MambaConfig", ids(), hidden_size=16, state_size=4, num_hidden_layers=1, **_TEXT
    ),
    "transformers RwkvModel": lambda: _hf(
        "RwkvModel",
        "RwkvConfig",
        ids(),
        hidden_size=16,
        attention_hidden_size=16,
        num_hidden_layers=2,
        context_length=16,
        **_TEXT,
    ),
    "transformers BertModel": lambda: _encoder("Bert"),
    "transformers RobertaModel": lambda: _encoder("Roberta"),
    "transformers DistilBertModel": lambda: _encoder("DistilBert", dim=32, n_heads=4, n_layers=2, hidden_dim=64),
    "transformers AlbertModel": lambda: _encoder("Albert", embedding_size=16),
    "transformers DebertaV2Model": lambda: _encoder(
        "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=8
    ),
    "transformers XLNetModel": lambda: _hf(
        "XLNetModel", "XLNetConfig", ids(), d_model=32, n_layer=1, n_head=4, d_inner=64, **_TEXT
    ),
    "transformers FNetModel": lambda: _hf("FNetModel", "FNetConfig", ids(), **_TEXT, **_WIDE),
    "transformers ConvBertModel": lambda: _encoder("ConvBert", embedding_size=32, head_ratio=2, conv_kernel_size=3),
    "transformers NystromformerModel": lambda: _encoder(
        "Nystromformer", num_landmarks=8, segment_means_seq_len=8, conv_kernel_size=3
    ),
    "transformers T5Model": lambda: _translator("T5", d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4),
    "transformers BartModel": lambda: _translator("Bart", **_BOTH),
    # sound, series
    "transformers WhisperModel": lambda: _hf(
        "WhisperModel",
        "WhisperConfig",
        torch.randn(4, 8, 32, dtype=F64),
        inputs={"decoder_input_ids": ids(4, 6)},
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        decoder_start_token_id=1,
        **_TEXT,
        **_BOTH,
    ),
    "transformers Wav2Vec2Model": lambda: _hf(
        "Wav2Vec2Model", "Wav2Vec2Config", torch.randn(4, 128, dtype=F64), **_SOUNDS
    ),
    "transformers HubertModel": lambda: _hf("HubertModel", "HubertConfig", torch.randn(4, 128, dtype=F64), **_SOUNDS),
    "transformers PatchTSTModel": lambda: _hf(
        "PatchTSTModel",
        "PatchTSTConfig",
        torch.randn(4, 32, 2, dtype=F64),
        d_model=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        ffn_dim=64,
        context_length=32,
        patch_length=4,
        patch_stride=4,
        num_input_channels=2,
    ),
    "transformers DecisionTransformerModel": lambda: _hf(
        "DecisionTransformerModel",
        "DecisionTransformerConfig",
        inputs={
            "states": _ROWS(2, 4, 5),
            "actions": _ROWS(2, 4, 3),
            "rewards": _ROWS(2, 4, 1),
            "returns_to_go": _ROWS(2, 4, 1),
            "timesteps": torch.arange(4).expand(2, 4).contiguous(),
            "attention_mask": torch.ones(2, 4, dtype=torch.long),
        },
        state_dim=5,
        act_dim=3,
        hidden_size=32,
        n_layer=1,
        n_head=4,
        max_ep_len=8,
        take=lambda out: out.last_hidden_state,
    ),
    # images
    "transformers CLIPModel": lambda: _hf(
        "CLIPModel",
        "CLIPConfig",
        ids(),
        images(),
        text_config={**_TEXT, **_WIDE, "num_hidden_layers": 1},
        vision_config={**_WIDE, **_PATCHES, "num_hidden_layers": 1},
        projection_dim=16,
        take=lambda out: out.logits_per_image,
    ),
    "transformers SiglipVisionModel": lambda: _hf(
        "SiglipVisionModel", "SiglipVisionConfig", images(), **_WIDE, **_PATCHES
    ),
    "transformers Dinov2Model": lambda: _vit("Dinov2", mlp_ratio=2),
    "transformers BeitModel": lambda: _vit("Beit", use_relative_position_bias=True),
    "transformers SwinModel": lambda: _hf(
        "SwinModel",
        "SwinConfig",
        images(4, 3, 32),
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    "transformers SegformerModel": lambda: _hf(
        "SegformerModel",
        "SegformerConfig",
        images(4, 3, 32),
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
    ),
    "transformers ConvNextModel": lambda: _hf(
        "ConvNextModel", "ConvNextConfig", images(4, 3, 32), hidden_sizes=[8, 16], depths=[1, 1], num_stages=2
    ),
    "transformers VideoMAEModel": lambda: _hf(
        "VideoMAEModel",
        "VideoMAEConfig",
        torch.randn(2, 4, 3, 16, 16, dtype=F64),
        num_frames=4,
        tubelet_size=2,
        **_WIDE,
        **_PATCHES,
    ),
    "transformers PerceiverModel": lambda: _hf(
        "PerceiverModel",
        "PerceiverConfig",
        _ROWS(4, 8, 16),
        num_latents=4,
        d_latents=16,
        d_model=16,
        num_blocks=1,
        num_self_attends_per_block=1,
        num_self_attention_heads=2,
        num_cross_attention_heads=2,
    ),
    "transformers PoolFormerModel": lambda: _hf(
        "PoolFormerModel",
        "PoolFormerConfig",
        images(4, 3, 32),
        depths=[1, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        padding=[2, 1],
        num_encoder_blocks=2,
    ),
    # diffusion
    "diffusers UNet2DModel": lambda: _diffused(
        "UNet2DModel",
        images(),
        torch.tensor(7),
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        **_BLOCKS,
    ),
    "diffusers UNet2DConditionModel": lambda: _diffused(
        "UNet2DConditionModel",
        images(4, 4),
        torch.tensor(7),
        _ROWS(4, 4, 16),
        sample_size=16,
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=2,
        **_BLOCKS,
    ),
    "diffusers AutoencoderKL": lambda: _diffused(
        "AutoencoderKL",
        images(),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        **_BLOCKS,
    ),
    "diffusers VQModel": lambda: _diffused(
        "VQModel",
        images(),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        num_vq_embeddings=16,
        **_BLOCKS,
    ),
    "diffusers DiTTransformer2DModel": lambda: _diffused(
        "DiTTransformer2DModel",
        images(4, 4, 8),
        torch.arange(4),
        torch.arange(4),
        num_layers=1,
        sample_size=8,
        num_embeds_ada_norm=8,
        **_HEADS,
    ),
    "diffusers SD3Transformer2DModel": lambda: _diffused(
        "SD3Transformer2DModel",
        images(2, 4, 8),
        _ROWS(2, 4, 16),
        _ROWS(2, 24),
        torch.tensor([1, 2]),
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=24,
        pos_embed_max_size=8,
        **_HEADS,
    ),
    "diffusers FluxTransformer2DModel": lambda: _diffused(
        "FluxTransformer2DModel",
        _ROWS(2, 8, 4),
        _ROWS(2, 4, 16),
        _ROWS(2, 24),
        torch.tensor([0.5, 0.25], dtype=F64),
        _ROWS(8, 3),
        _ROWS(4, 3),
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        joint_attention_dim=16,
        pooled_projection_dim=24,
        axes_dims_rope=(2, 2, 4),
        **_HEADS,
    ),
    # images by convolutions
    "torchvision resnet18": lambda: _vision("resnet18"),
    "torchvision resnet18 in training": lambda: _vision("resnet18", train=True),
    "torchvision mobilenet_v3_small": lambda: _vision("mobilenet_v3_small"),
    "torchvision densenet121": lambda: _of(
        "torchvision.models.DenseNet", 8, (2, 2), 8, args=(images(4, 3, 32),), num_classes=8
    ),
    "torchvision shufflenet_v2_x0_5": lambda: _vision("shufflenet_v2_x0_5"),
    "torchvision squeezenet1_1": lambda: _vision("squeezenet1_1"),
    "torchvision r3d_18": lambda: (
        _know_torchvision(),
        _of("torchvision.models.video.r3d_18", args=(_ROWS(2, 3, 4, 16, 16),), weights=None, num_classes=8),
    )[1],
    "timm mixer": lambda: _timm("gmixer_12_224", img_size=32),
    "timm cait": lambda: _timm("cait_xxs24_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4),
    "timm xcit": lambda: _timm("xcit_nano_12_p16_224", img_size=32, embed_dim=32, depth=2, num_heads=4),
    "timm convnextv2": lambda: _timm("convnextv2_atto", depths=[1, 1, 1, 1], dims=[8, 8, 16, 16]),
    "timm ghostnet": lambda: _timm("ghostnet_050"),
    "timm vit with registers": lambda: _timm(
        "vit_small_patch14_reg4_dinov2", side=28, img_size=28, embed_dim=32, depth=2, num_heads=4
    ),
    "timm efficientnet": lambda: _timm("efficientnet_b0"),
    # recommendation
    **{
        f"recommendation {name}": (lambda name=name: _recommender(name))
        for name in ("DeepFM", "WideDeep", "DCN", "AutoInt", "FiBiNet")
    },
    # science
    "neuraloperator FNO": _spectral,
    "nflows coupling": _flow,
    "mambapy Mamba": lambda: _of(
        "mambapy.mamba.Mamba",
        _config("mambapy.mamba.MambaConfig", d_model=16, n_layers=1, d_state=4),
        args=(_ROWS(4, 8, 16),),
    ),
    "x-transformers Decoder": lambda: _of(
        "x_transformers.TransformerWrapper",
        num_tokens=48,
        max_seq_len=16,
        attn_layers=_config("x_transformers.Decoder", dim=32, depth=2, heads=4, attn_dim_head=8, rotary_pos_emb=True),
        args=(ids(),),
    ),
    "vit-pytorch SimpleViT": lambda: _of(
        "vit_pytorch.SimpleViT",
        image_size=16,
        patch_size=4,
        num_classes=8,
        dim=32,
        depth=2,
        heads=4,
        dim_head=8,
        mlp_dim=64,
        args=(images(),),
    ),
    # torch's own
    "torch Transformer": lambda: _of(
        "torch.nn.Transformer", 32, 4, 1, 1, 64, batch_first=True, args=(_ROWS(4, 8, 32), _ROWS(4, 6, 32))
    ),
    "torch LSTM": lambda: _of(
        "torch.nn.LSTM", 8, 16, 2, batch_first=True, args=(_ROWS(4, 6, 8),), take=lambda out: out[0]
    ),
    "torch GRU": lambda: _of(
        "torch.nn.GRU", 8, 16, 1, bidirectional=True, args=(_ROWS(6, 4, 8),), take=lambda out: out[0]
    ),
}
