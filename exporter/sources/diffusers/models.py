"""The classes of diffusers that are converted, each with its inputs and the sizes that vary.

    SanaTransformer2DModel        one step of denoising an image
        hidden_states (B, C, H, W), encoder_hidden_states (B, L, D), timestep (B),
        encoder_attention_mask (B, L) -> sample (B, C', H, W)

    SanaVideoTransformer3DModel   of a video: hidden_states (B, C, F, H, W)

    AutoencoderDC                 its decoder: latent (B, C, H, W) -> sample (B, 3, f H, f W)

Heights and widths are those of latents, in whole patches. A pipeline passes ``timestep`` times the
setting ``timestep_scale``, and ``latent`` divided by the setting ``scaling_factor``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.export import Dim

from linexport.graph.dims import DimRange
from linexport.system.untyped import DynamicShapes, LibraryObject

SEED = 0
"""Seed of the example inputs."""

TOKENS, PATCHES = 5, (4, 5)
"""Tokens of a text, and patches of an image, in the example inputs."""

STEPS = 1000
"""Timesteps are below."""

LATENTS = 32
"""Side of the latents of an autoencoder up to which it is compared: its configuration has none."""


@dataclass(frozen=True)
class ModelCall:
    """A model as it is called.

    Attributes:
        module: takes the inputs by position.
        args: example inputs.
        dynamic_shapes: of them, in torch.export's notation.
        outputs: their names.
        part: of the model that is taken; "" for the whole.
        integer_ranges: see ``LoadedModel``.
        defaults: see ``LoadedModel``.
        ranges: see ``LoadedModel``.
        warnings: what the user should know.
    """

    module: nn.Module
    args: tuple[Tensor, ...]
    dynamic_shapes: DynamicShapes
    outputs: tuple[str, ...] = ("sample",)
    part: str = ""
    integer_ranges: dict[int, tuple[int, int]] = field(default_factory=dict)
    defaults: Mapping[str, int] = field(default_factory=dict)
    ranges: Mapping[str, DimRange] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


class Denoiser(nn.Module):
    """A transformer of a pipeline, called with tensors alone."""

    def __init__(self, model: LibraryObject) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor,
        encoder_attention_mask: Tensor,
        guidance: Tensor | None = None,
    ) -> Tensor:
        """Return the prediction of a step.

        Args:
            hidden_states: (B, C, ..., H, W), noisy latents.
            encoder_hidden_states: (B, L, D), of the text.
            timestep: (B).
            encoder_attention_mask: (B, L), int64, 1 for tokens and 0 for padding.
            guidance: (B), of a model that is made for it.
        """
        sample: Tensor = self.model(
            hidden_states,
            encoder_hidden_states,
            timestep,
            guidance=guidance,
            encoder_attention_mask=encoder_attention_mask,
            return_dict=False,
        )[0]
        return sample


class LatentDecoder(nn.Module):
    """The decoder of an autoencoder."""

    def __init__(self, decoder: LibraryObject) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, latent: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, 3, f H, f W)."""
        sample: Tensor = self.decoder(latent)
        return sample


def _sana(model: LibraryObject) -> ModelCall:
    patch, base = int(model.config.patch_size), int(model.config.sample_size)
    # Images of one area are up to four times as wide as high.
    sides = _usual(patch, base)
    # The table of positions of the base size is computed as any other.
    model.patch_embed.height = model.patch_embed.width = None
    return _denoiser(model, {"height": (patch, sides), "width": (patch, sides)})


def _sana_video(model: LibraryObject) -> ModelCall:
    in_time, *in_space = map(int, model.config.patch_size)
    most, base = int(model.config.rope_max_seq_len), int(model.config.sample_size)
    sizes = {"frames": (in_time, _usual(in_time, 20 * in_time, most))}
    sides = zip(("height", "width"), in_space, strict=True)
    sizes |= {name: (patch, _usual(patch, 2 * base, most)) for name, patch in sides}
    return _denoiser(model, sizes, most)


def _usual(patch: int, usual: int, most: int | None = None) -> DimRange:
    """Return a range to twice the usual size, in whole patches, ``most`` of them where given."""
    counts = (max(1, n // patch) for n in (usual, 2 * usual))
    opt, largest = (patch * (n if most is None else min(n, most)) for n in counts)
    return DimRange(patch, opt, largest, multiple=patch)


def _denoiser(
    model: LibraryObject, sizes: Mapping[str, tuple[int, DimRange]], most: int | None = None
) -> ModelCall:
    """Return the call of a transformer.

    Args:
        model: of diffusers.
        sizes: by the name of each size of its latents, the size of a patch and the usual range.
        most: patches along each of them that it has positions for; None: any number.
    """
    config, batch, tokens = model.config, Dim("batch"), Dim("tokens")
    generator = torch.Generator().manual_seed(SEED)
    patches = (3, *PATCHES)[-len(sizes) :]
    shape = [n * patch for n, (patch, _) in zip(patches, sizes.values(), strict=True)]
    text = (2, TOKENS, int(config.caption_channels))
    mask = torch.ones(text[:2], dtype=torch.int64)
    mask[0, TOKENS // 2 :] = 0
    args = [
        torch.randn(2, int(config.in_channels), *shape, generator=generator),
        torch.randn(text, generator=generator),
        STEPS * torch.rand(2, generator=generator),
        mask,
    ]
    limit = {} if most is None else {"max": most}
    counts = {name: Dim(name, **limit) for name in sizes}
    dims = {n: patch * counts[n] if patch > 1 else counts[n] for n, (patch, _) in sizes.items()}
    latents = {0: batch, **dict(enumerate(dims.values(), 2))}
    shapes = [latents, {0: batch, 1: tokens}, {0: batch}, {0: batch, 1: tokens}]
    if config.guidance_embeds:
        args.append(torch.rand(2, generator=generator))
        shapes.append({0: batch})
    return ModelCall(
        Denoiser(model),
        tuple(args),
        tuple(shapes),
        integer_ranges={3: (0, 2)},
        defaults={"encoder_attention_mask": 1},
        ranges={dims[name].__name__: usual for name, (_, usual) in sizes.items()},
    )


def _autoencoder_dc(model: LibraryObject) -> ModelCall:
    generator = torch.Generator().manual_seed(SEED)
    channels = int(model.config.latent_channels)
    side = DimRange(1, LATENTS // 2, LATENTS)
    return ModelCall(
        LatentDecoder(model.decoder),
        (torch.randn(2, channels, 6, 10, generator=generator),),
        ({0: Dim("batch"), 2: Dim("height"), 3: Dim("width")},),
        part="its decoder",
        ranges={"height": side, "width": side},
        warnings=("Of AutoencoderDC only the decoder is converted, from latents to images.",),
    )


CALLS: dict[str, Callable[[LibraryObject], ModelCall]] = {
    "AutoencoderDC": _autoencoder_dc,
    "SanaTransformer2DModel": _sana,
    "SanaVideoTransformer3DModel": _sana_video,
}
"""By the name of the class in diffusers."""
